/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/thread.h"

#include <signal.h>

int ep_thread_start(pthread_t *out, void *(*body)(void *context), void *context) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the new thread inherits it */
    int error = pthread_create(out, NULL, body, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
