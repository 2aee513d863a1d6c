/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/extras.h"

#define GLOBAL_SCALE "extras.global_scale"

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
    EP_TRY(check_taken(o, "extras.bias1", out->bias1, takes, EP_TAKES_BIAS));
    return check_taken(o, GLOBAL_SCALE, out->global_scale, takes, EP_TAKES_GLOBAL_SCALE);
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

EpStatus ep_extras_global_scale(const EpOperation *o, const EpExtras *extras, EpScatterTensors *t) {
    const EpTensor *scale = extras->global_scale;
    int needed = t->format.scaling == EP_SCALE_GLOBAL;
    if (scale && !needed)
        return ep_refuse(&o->call, EP_ERR_UNSUPPORTED, GLOBAL_SCALE,
                         "expected NULL, since the handle's quant has no global scale, got a "
                         "tensor");
    EP_TRY(ep_arg_pair(o, GLOBAL_SCALE, scale, "the handle's quant", needed ? t : NULL));
    if (!scale) return EP_OK;
    EP_TRY(ep_arg_tensor(&o->call, GLOBAL_SCALE, scale, 1));
    EP_TRY(ep_arg_float(&o->call, GLOBAL_SCALE, scale));
    EP_TRY(ep_arg_dim(&o->call, GLOBAL_SCALE, scale, 0, 1, "one number"));
    EP_TRY(ep_arg_memory(&o->call, o->handle->group, GLOBAL_SCALE, scale));
    t->global_scale = scale->data;
    return EP_OK;
}
