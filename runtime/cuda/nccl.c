/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "runtime/cuda/cuda.h"
#include "runtime/log.h"
#include "runtime/wait.h"

#define OLDEST_NCCL 22803 /* has symmetric windows as used here */
#define NEWEST_NCCL 23299 /* of those that libep was tested with: later ones are tried */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static EpNccl api;
static int loaded;
static char failure[256];

static int find(void *library, const char *name, void *out) {
    void *symbol = dlsym(library, name);
    if (!symbol) snprintf(failure, sizeof(failure), "libnccl.so.2 has no %s", name);
    memcpy(out, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static void load(void) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        snprintf(failure, sizeof(failure), "expected NCCL, got none: %s", dlerror());
        return;
    }
    int complete = 1;
#define NCCL_FIND(function) complete = complete && find(library, #function, &api.function);
    EP_NCCL_MAP(NCCL_FIND)
#undef NCCL_FIND
    if (!complete || api.ncclGetVersion(&api.version) != ncclSuccess) return;
    (void)find(library, "ncclWinGetUserPtr", &api.ncclWinGetUserPtr);
    (void)find(library, "ncclGetLastError", &api.ncclGetLastError);
    loaded = api.version >= OLDEST_NCCL;
    if (!loaded)
        snprintf(failure, sizeof(failure),
                 "expected NCCL 2.28.3 or newer (libnccl.so.2), got %d.%d.%d", api.version / 10000,
                 api.version / 100 % 100, api.version % 100);
    /* Every window is probed before its first use, whatever the version. */
    if (api.version > NEWEST_NCCL)
        EP_WARN("NCCL %d.%d.%d is newer than 2.32, the newest that libep was tested with",
                api.version / 10000, api.version / 100 % 100, api.version % 100);
}

const EpNccl *ep_nccl_load(char *reason, size_t reason_bytes) {
    pthread_once(&once, load);
    if (!loaded) snprintf(reason, reason_bytes, "%s", failure);
    return loaded ? &api : NULL;
}

const char *ep_nccl_explain(const EpNccl *nccl, ncclResult_t result) {
    static _Thread_local char text[512];
    int is_outside = result == ncclUnhandledCudaError || result == ncclSystemError;
    const char *last = is_outside && nccl->ncclGetLastError ? nccl->ncclGetLastError(NULL) : NULL;
    snprintf(text, sizeof(text), "%s%s%s", nccl->ncclGetErrorString(result),
             last && *last ? ": " : "", last ? last : "");
    return text;
}

/* A call's result does not tell whether it is complete: ncclCommWindowRegister returns ncclSuccess
 * when it has only started. The caller asks ep_poll_abort why the wait has ended. */
ncclResult_t ep_nccl_settle(const EpNccl *nccl, ncclComm_t comm, ncclResult_t result,
                            double seconds) {
    EpWait wait;
    if (result != ncclSuccess && result != ncclInProgress) return result;
    ep_wait_begin(&wait, seconds, 0);
    do {
        ncclResult_t queried = nccl->ncclCommGetAsyncError(comm, &result);
        if (queried != ncclSuccess) return queried;
    } while (result == ncclInProgress && ep_poll_abort() == EP_OK && ep_wait_pause(&wait));
    return result;
}

static void *make_call(void *argument) {
    EpNcclCall *call = argument;
    int before = ep_cuda_use(call->device);
    call->result = call->make(call);
    ep_cuda_restore(before);
    __atomic_store_n(&call->returned, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Without a thread the call is made here: the other ranks are on their way into it. */
static void start(EpNcclCall *call) {
    pthread_t thread;
    if (ep_thread_start(&thread, make_call, call) != 0)
        (void)make_call(call);
    else
        (void)pthread_detach(thread);
}

int ep_nccl_call(EpNcclCall *call, double seconds) {
    EpWait wait;
    start(call);
    ep_wait_begin(&wait, seconds, 0);
    while (!__atomic_load_n(&call->returned, __ATOMIC_ACQUIRE))
        if (ep_poll_abort() != EP_OK || !ep_wait_pause(&wait)) return 0;
    return 1;
}
