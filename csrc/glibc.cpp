// libstdc++ from GCC 11 on asks glibc, at each count of a shared_ptr, whether the process has a single
// thread. That variable is new in glibc 2.32, and wheels are for 2.28 (manylinux_2_28). Beside torch the
// answer is no: this one, which no other library sees, stands in for it. (What else is too new comes with
// cudart: see tools/older_glibc.py.)
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
