/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of the host backend. Peers read rows from segments, so windows need not be shared. */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/memory/host/host_memory.h"

#define WINDOW_ALIGNMENT 128

static EpStatus allocate(const EpCall *call, EpWindow *window) {
    size_t bytes = (window->bytes + WINDOW_ALIGNMENT - 1) / WINDOW_ALIGNMENT * WINDOW_ALIGNMENT;
    window->memory = aligned_alloc(WINDOW_ALIGNMENT, bytes);
    if (!window->memory)
        return ep_refuse(call, EP_ERR_NO_MEMORY, "bytes", "expected %zu bytes, got none", bytes);
    memset(window->memory, 0, bytes);
    return EP_OK;
}

EpStatus ep_host_open_window(EpGroup *group, const EpCall *call, EpWindow *window) {
    if (!window->owned) return EP_OK;
    EpStatus status = ep_group_agree(group, call, allocate(call, window));
    if (status != EP_OK) free(window->memory);
    return status;
}

void ep_host_close_window(EpGroup *group, EpWindow *window, int together) {
    (void)group, (void)together;
    if (window->owned) free(window->memory);
}
