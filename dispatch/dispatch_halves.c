/* SPDX-License-Identifier: Apache-2.0 */
/* ep_dispatch in two halves. */
#include "dispatch/arguments.h"

/* What the second half needs to know. */
static void remember(const EpOperation *o, EpHandle *handle, const EpScatter *sent) {
    EpFlight *flight = &handle->flight;
    flight->what = EP_FLYING_DISPATCH;
    flight->step = o->step;
    flight->scatter = *sent;
    flight->scatter.rows = flight->scatter.scales = NULL;
    flight->scatter.topk_weights = NULL;
    flight->scatter.routing = NULL;
}

EpStatus ep_dispatch_send(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                          const EpTensor *scales, EpStream stream) {
    const EpSent sent = {tokens, topk_weights, scales};
    EpOperation o;
    EpScatter scatter;
    EpRouting routing;
    EP_TRY(ep_operation_begin_dispatch_send(&o, "ep_dispatch_send", handle));
    EP_TRY(ep_dispatch_describe_sent(&o, &sent, &scatter));
    scatter.half = EP_SEND_HALF;
    scatter.stream = stream;
    scatter.routing = ep_operation_routing(&o, stream, &routing);
    EP_TRY(ep_run_scatter(&o.call, handle, &scatter));
    remember(&o, handle, &scatter);
    return EP_OK;
}

EpStatus ep_dispatch_wait(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                          const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                          const EpTensor *recv_topk_idx) {
    const EpReceived received = {recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx};
    EpOperation o;
    EP_TRY(ep_operation_begin_wait(&o, "ep_dispatch_wait", handle, EP_FLYING_DISPATCH));
    EpScatter scatter = handle->flight.scatter;
    EP_TRY(ep_dispatch_describe_received(&o, &received, &scatter));
    scatter.half = EP_WAIT_HALF;
    scatter.stream = stream;
    EP_TRY(ep_run_scatter(&o.call, handle, &scatter));
    handle->flight.what = EP_FLYING_NOTHING;
    return EP_OK;
}
