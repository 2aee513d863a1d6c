/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/watch.h"

#include "tests/harness/check.h"

static _Thread_local Watch watch;

static _Thread_local int failing; /* allocations until the one that fails; 0: none */

Watch watch_now(void) {
    return watch;
}

int watch_fail(int allocation) {
    int left = failing;
    failing = allocation;
    return left;
}

#if !TESTS_SANITIZED

#include <errno.h>
#include <stddef.h>

/* glibc's functions, under the names that it provides for such replacements. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

/* Counts an allocation. Returns 1 if it fails. */
static int allocate(void) {
    watch.allocations++;
    if (!failing || --failing) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes) {
    return allocate() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes) {
    return allocate() ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *memory, size_t bytes) {
    return allocate() ? NULL : __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    return allocate() ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    *out = allocate() ? NULL : __libc_memalign(alignment, bytes);
    return *out ? 0 : ENOMEM;
}

extern char **environ;

char *getenv(const char *name) {
    size_t length = strlen(name);
    watch.look_ups++;
    for (char **entry = environ; entry && *entry; entry++)
        if (strncmp(*entry, name, length) == 0 && (*entry)[length] == '=')
            return *entry + length + 1;
    return NULL;
}

char *secure_getenv(const char *name) {
    return getenv(name);
}

#endif
