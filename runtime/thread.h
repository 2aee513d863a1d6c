/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_THREAD_H
#define EP_RUNTIME_THREAD_H

#include <pthread.h>

/** Start a thread of the library's, which takes none of the program's signals. Returns 0 or an
 *  error of pthread_create. */
int ep_thread_start(pthread_t *out, void *(*body)(void *context), void *context);

#endif
