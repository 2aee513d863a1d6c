/* SPDX-License-Identifier: Apache-2.0 */
/* ep_dispatch: check the arguments, then scatter. */
#include "dispatch/arguments.h"

EpStatus ep_dispatch(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                     const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                     const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                     const EpTensor *recv_topk_idx) {
    const EpSent sent = {tokens, topk_weights, scales};
    const EpReceived received = {recv_tokens, recv_topk_weights, recv_scales, recv_topk_idx};
    EpOperation o;
    EpScatter scatter;
    EpRouting routing;
    EP_TRY(ep_operation_begin_dispatch(&o, "ep_dispatch", handle));
    EP_TRY(ep_dispatch_describe_sent(&o, &sent, &scatter));
    EP_TRY(ep_dispatch_describe_received(&o, &received, &scatter));
    scatter.stream = stream;
    scatter.routing = ep_operation_routing(&o, stream, &routing);
    return ep_run_scatter(&o.call, handle, &scatter);
}
