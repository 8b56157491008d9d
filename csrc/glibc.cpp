// libstdc++ of GCC 11 and later reads a glibc variable at each shared_ptr count, to know whether the process
// has a single thread. The variable is new in glibc 2.32, and wheels target 2.28 (manylinux_2_28). A process
// with torch has several threads, so the value is 0. This definition replaces the variable and is hidden from
// other libraries. (tools/older_glibc.py handles newer symbols that come with cudart.)
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
