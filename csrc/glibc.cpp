// libstdc++ from GCC 11 on asks glibc, at each count of a shared_ptr, whether the process has a single thread. That
// variable is new in glibc 2.32, and the only symbol of the two libraries that is newer than 2.28. Beside torch the
// answer is no: with one of our own, which nobody else sees, the wheels need nothing newer (manylinux_2_28).
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
