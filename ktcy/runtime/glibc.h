/* glibc 2.32 and 2.34 moved these from libpthread to libc under new versions. The old versions are the same code and
 * stay, so a module built on a new system still loads on an older one, whose Python links libpthread. */
#ifndef KT_GLIBC_H
#define KT_GLIBC_H

__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");

#endif
