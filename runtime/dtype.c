/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/dtype.h"

static const struct {
    const char *name;
    size_t bytes;
} types[] = {
    [EP_TYPE_BF16] = {"bf16", 2},         [EP_TYPE_FP16] = {"fp16", 2},
    [EP_TYPE_FP32] = {"fp32", 4},         [EP_TYPE_FP8_E4M3] = {"fp8_e4m3", 1},
    [EP_TYPE_FP8_E5M2] = {"fp8_e5m2", 1}, [EP_TYPE_UINT8] = {"uint8", 1},
    [EP_TYPE_INT32] = {"int32", 4},       [EP_TYPE_INT64] = {"int64", 8},
};

static int is_type(EpType type) {
    return (int)type >= EP_TYPE_BF16 && (int)type <= EP_TYPE_INT64;
}

size_t ep_type_bytes(EpType type) {
    return is_type(type) ? types[type].bytes : 0;
}

const char *ep_type_name(EpType type) {
    return is_type(type) ? types[type].name : "no type";
}
