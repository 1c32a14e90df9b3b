/* Anonymous memory in huge pages where the system gives them, and its NUMA node. */
#ifndef KT_MEMORY_H
#define KT_MEMORY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <linux/mempolicy.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KT_PAGE ((size_t)4096)
#define KT_HUGE_PAGE ((size_t)2 << 20)
#define KT_MOST_NODES 1024

/* Bytes that kt_map takes for a request. */
static inline size_t kt_whole_pages(size_t bytes) { return (bytes + KT_PAGE - 1) / KT_PAGE * KT_PAGE; }

/* Zeroed memory that nobody has touched; from 2 MiB on its start is a multiple of 2 MiB. NULL when there is none.
 * Returned by munmap of kt_whole_pages(bytes) bytes. */
static inline void *kt_map(size_t bytes)
{
    if (bytes > PTRDIFF_MAX - 2 * KT_HUGE_PAGE)
        return NULL;
    size_t size = kt_whole_pages(bytes ? bytes : 1), pad = size < KT_HUGE_PAGE ? 0 : KT_HUGE_PAGE;
    char *base = mmap(NULL, size + pad, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    if (!pad)
        return base;
    size_t head = -(uintptr_t)base % KT_HUGE_PAGE;
    if (head)
        munmap(base, head);
    munmap(base + head + size, pad - head);
    madvise(base + head, size, MADV_HUGEPAGE);
    return base + head;
}

/* Pages not touched yet will come from `node`, or from elsewhere when it is full: a full node must not kill the
 * process. Returns 0 or an errno: containers often forbid the call. */
static inline int kt_bind(void *base, size_t bytes, int node)
{
    enum { BITS = 8 * sizeof(unsigned long) };
    unsigned long mask[KT_MOST_NODES / BITS] = {0};
    if (node < 0 || node >= KT_MOST_NODES)
        return EINVAL;
    mask[node / BITS] = 1UL << node % BITS;
    /* The kernel counts one bit more than there are. */
    return syscall(SYS_mbind, base, bytes, MPOL_PREFERRED, mask, KT_MOST_NODES + 1, 0) ? errno : 0;
}

/* 0 when this process may bind memory to the node, else an errno. */
static inline int kt_bind_refused(int node)
{
    void *page = kt_map(KT_PAGE);
    if (!page)
        return ENOMEM;
    int error = kt_bind(page, KT_PAGE, node);
    munmap(page, KT_PAGE);
    return error;
}

/* The node that a touched page lies on, or -1 when the system does not tell. */
static inline int kt_node_of(void *page)
{
    int node;
    return syscall(SYS_get_mempolicy, &node, NULL, 0, page, MPOL_F_NODE | MPOL_F_ADDR) ? -1 : node;
}

#endif
