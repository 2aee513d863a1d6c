/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/extras.h"

static EpStatus check_taken(const EpOperation *o, const char *argument, const EpTensor *t,
                            unsigned takes, unsigned bit) {
    if (!t || takes & bit) return EP_OK;
    return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, argument,
                     "expected NULL, since this call has no use for it, got a tensor");
}

EpStatus ep_extras_read(const EpOperation *o, const EpExtras *given, unsigned takes,
                        EpExtras *out) {
    *out = (EpExtras)EP_EXTRAS_INIT;
    if (!given) return EP_OK;
    EP_TRY(ep_read_struct(&o->call, "extras", given, EP_FIRST_SIZE(EpExtras, bias1), out));
    EP_TRY(check_taken(o, "extras.bias0", out->bias0, takes, EP_TAKES_BIAS));
    return check_taken(o, "extras.bias1", out->bias1, takes, EP_TAKES_BIAS);
}

EpStatus ep_extras_bias(EpOperation *o, const EpExtras *extras, const EpTensor *out,
                        EpGatherTensors *t) {
    const char *const names[EP_MAX_BIASES] = {"extras.bias0", "extras.bias1"};
    const EpTensor *const biases[EP_MAX_BIASES] = {extras->bias0, extras->bias1};
    for (int i = 0; i < EP_MAX_BIASES; i++) {
        if (!biases[i]) continue;
        EP_TRY(ep_arg_token_rows(o, names[i], biases[i], ep_tensor_row_elements(out), "H"));
        EP_TRY(ep_arg_type(&o->call, names[i], biases[i], out->type));
        EP_TRY(ep_arg_token_bytes(o, names[i], biases[i]));
        t->bias[t->num_biases++] = biases[i]->data;
    }
    return EP_OK;
}
