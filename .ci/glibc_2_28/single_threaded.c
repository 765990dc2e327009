/* A variable of glibc 2.32 that libstdc++'s shared pointers read: 0 makes their counts atomic. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
