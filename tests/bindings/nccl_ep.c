/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL EP's interface, as far as it goes without a group: struct layouts, tensors, wrong structs.
 */
#include "bindings/nccl_ep/nccl_ep.h"
#include "tests/harness/check.h"

/* Programs are compiled with these numbers: they never change. */
_Static_assert(sizeof(ncclEpTensor_t) == 48, "");
_Static_assert(sizeof(ncclEpGroupConfig_t) == 120, "");
_Static_assert(offsetof(ncclEpGroupConfig_t, dispatch_num_sms) == NCCL_EP_GROUP_CONFIG_V2, "");
_Static_assert(offsetof(ncclEpGroupConfig_t, combine_num_sms) == 116, "");
_Static_assert(NCCL_EP_COMB_QUANT_MXFP8 == 2, "");
_Static_assert(offsetof(ncclEpGroupConfig_t, timeout_ns) + 8 == NCCL_EP_GROUP_CONFIG_V1, "");
_Static_assert(sizeof(ncclEpLayoutInfo_t) == 48, "");
_Static_assert(offsetof(ncclEpLayoutInfo_t, recv_topk_idx_kind) == NCCL_EP_LAYOUT_INFO_V1, "");
_Static_assert(sizeof(ncclEpDispatchInputs_t) == NCCL_EP_DISPATCH_INPUTS_V1, "");
_Static_assert(sizeof(ncclEpDispatchOutputs_t) == NCCL_EP_DISPATCH_OUTPUTS_V1, "");
_Static_assert(sizeof(ncclEpCombineInputs_t) == 32, "");
_Static_assert(offsetof(ncclEpCombineInputs_t, scales) == NCCL_EP_COMBINE_INPUTS_V1, "");
_Static_assert(sizeof(ncclEpCombineOutputs_t) == NCCL_EP_COMBINE_OUTPUTS_V1, "");
_Static_assert(sizeof(ncclEpHandleConfig_t) == NCCL_EP_HANDLE_CONFIG_V1, "");
_Static_assert(sizeof(ncclEpDispatchConfig_t) == 24, "");
_Static_assert(offsetof(ncclEpDispatchConfig_t, quant_recipe) == NCCL_EP_DISPATCH_CONFIG_V1, "");
_Static_assert(sizeof(ncclEpCombineConfig_t) == 20, "");
_Static_assert(offsetof(ncclEpCombineConfig_t, quant_recipe) == NCCL_EP_COMBINE_CONFIG_V1, "");

/* Where stderr goes while a call is made, and where it went before. */
typedef struct Stderr {
    FILE *file;
    int before;
} Stderr;

static Stderr catch_stderr(void) {
    Stderr caught = {tmpfile(), dup(STDERR_FILENO)};
    fflush(stderr);
    dup2(fileno(caught.file), STDERR_FILENO);
    return caught;
}

/* Check the result of a call and what it has printed: one line with this sentence, or nothing. */
static void check_call(Stderr caught, int got, int expected, const char *sentence) {
    char text[2000] = "";
    fflush(stderr);
    dup2(caught.before, STDERR_FILENO);
    close(caught.before);
    rewind(caught.file);
    size_t length = fread(text, 1, sizeof(text) - 1, caught.file);
    fclose(caught.file);
    CHECK(got == expected, "%d instead of %d: %s", got, expected, text);
    CHECK(strstr(text, sentence), "\"%s\" has no \"%s\"", text, sentence);
    const char *end = strchr(text, '\n');
    CHECK(end ? end + 1 == text + length : !length, "not one line: \"%s\"", text);
}

#define REFUSED(call, result, sentence)                       \
    do {                                                      \
        Stderr caught_ = catch_stderr();                      \
        check_call(caught_, (call), NCCL_##result, sentence); \
    } while (0)

SoloTest(bindings_nccl_ep, version) {
    int version = 0;
    CHECK(ncclEpGetVersion(&version) == NCCL_SUCCESS, "no version");
    CHECK(version / 10000 == 0 && version / 100 == 2, "%d", version);
    CHECK(version % 100 > 0, "%d is the version of NVIDIA's own library", version);
    REFUSED(ncclEpGetVersion(NULL), INVALID_ARGUMENT, "libnccl_ep: ncclEpGetVersion: version: ");
}

SoloTest(bindings_nccl_ep, tensors) {
    size_t sizes[] = {5, 7, 9};
    ncclEpTensor_t *t = NULL, own = {.size = sizeof(own), .magic = NCCL_EP_TENSOR_MAGIC};
    REQUIRE(ncclEpTensorAlloc(&t, 3, NCCL_FLOAT16, sizes, NULL) == NCCL_SUCCESS && t, "no tensor");
    sizes[1] = 0;
    CHECK(t->ndim == 3 && t->datatype == NCCL_FLOAT16 && !t->data && !t->win_hdl, "its fields");
    CHECK(t->sizes[0] == 5 && t->sizes[1] == 7 && t->sizes[2] == 9, "its sizes");
    CHECK(ncclEpTensorDestroy(t) == NCCL_SUCCESS && ncclEpTensorDestroy(NULL) == NCCL_SUCCESS,
          "destroying");
    REFUSED(ncclEpTensorDestroy(&own), INVALID_ARGUMENT, "tensor: expected one from");
    t = NULL;
    REFUSED(ncclEpTensorAlloc(&t, 0, NCCL_INT32, sizes, NULL), INVALID_ARGUMENT, "ndim: expected");
    REFUSED(ncclEpTensorAlloc(&t, 4, NCCL_INT32, sizes, NULL), INVALID_ARGUMENT, "got 4");
    REFUSED(ncclEpTensorAlloc(&t, 1, NCCL_INT32, NULL, NULL), INVALID_ARGUMENT, "sizes: expected");
    REFUSED(ncclEpTensorAlloc(NULL, 1, NCCL_INT32, sizes, NULL), INVALID_ARGUMENT, "tensor: ");
    CHECK(!t, "a refused call has made a tensor");
}

/* A sentence is printed once where it repeats. */
SoloTest(bindings_nccl_ep, repeated_sentence) {
    REFUSED(ncclEpTensorDestroy((ncclEpTensor_t[]){{.magic = 7}}), INVALID_ARGUMENT, "0x00000007");
    REFUSED(ncclEpTensorDestroy((ncclEpTensor_t[]){{.magic = 7}}), INVALID_ARGUMENT, "");
    REFUSED(ncclEpTensorDestroy((ncclEpTensor_t[]){{.magic = 8}}), INVALID_ARGUMENT, "0x00000008");
}

static ncclEpGroupConfig_t right_config(void) {
    return (ncclEpGroupConfig_t){.size = sizeof(ncclEpGroupConfig_t),
                                 .magic = NCCL_EP_MAGIC,
                                 .version = 2,
                                 .algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT,
                                 .num_experts = 8,
                                 .max_dispatch_tokens_per_rank = 16,
                                 .max_token_bytes = 256};
}

/* Wrong configurations are refused before the communicator is touched: here it is none. */
SoloTest(bindings_nccl_ep, wrong_configurations) {
    static const struct {
        size_t field;
        unsigned value;
        const char *sentence;
    } wrong[] = {
        {offsetof(ncclEpGroupConfig_t, size), 95, "config: expected at least 96 bytes"},
        {offsetof(ncclEpGroupConfig_t, magic), 0, "NCCL_EP_..._INIT, got magic 0x00000000"},
        {offsetof(ncclEpGroupConfig_t, algorithm), 2, "config.algorithm: expected 0 or 1"},
        {offsetof(ncclEpGroupConfig_t, num_experts), 0, "config.num_experts: expected 1"},
        {offsetof(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank), 0,
         "config.max_dispatch_tokens_per_rank: expected 1"},
        {offsetof(ncclEpGroupConfig_t, max_token_bytes), 0, "config.max_token_bytes: "},
        {offsetof(ncclEpGroupConfig_t, max_token_bytes), 65537, "1 .. 65536, got 65537"},
        {offsetof(ncclEpGroupConfig_t, max_recv_tokens_per_rank), 0x80000000u,
         "config.max_recv_tokens_per_rank: expected at most"},
        {offsetof(ncclEpGroupConfig_t, num_topk), 33, "config.num_topk: expected at most 32"},
        {offsetof(ncclEpGroupConfig_t, overflow_policy), 3, "expected 0 .. 2, got 3"},
        {offsetof(ncclEpGroupConfig_t, overflow_policy), NCCL_EP_OVERFLOW_DROP,
         "where nothing is dropped, got DROP"}};
    ncclEpGroup_t group = NULL;
    struct ncclComm *nobody = (struct ncclComm *)&group;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        ncclEpGroupConfig_t config = right_config();
        memcpy((char *)&config + wrong[i].field, &wrong[i].value, sizeof(unsigned));
        REFUSED(ncclEpCreateGroup(&group, nobody, &config), INVALID_ARGUMENT, wrong[i].sentence);
    }
    ncclEpGroupConfig_t config = right_config();
    REFUSED(ncclEpCreateGroup(&group, NULL, &config), INVALID_ARGUMENT, "comm: expected a pointer");
    REFUSED(ncclEpCreateGroup(NULL, nobody, &config), INVALID_ARGUMENT, "ep_group: expected");
    REFUSED(ncclEpCreateGroup(&group, nobody, NULL), INVALID_ARGUMENT, "config: expected a struct");
    CHECK(!group, "a refused call has made a group");
}

/* Calls on no group and on no handle. */
SoloTest(bindings_nccl_ep, nothing_to_call_on) {
    int number = 0;
    size_t bytes = 0;
    ncclEpHandle_t handle = NULL;
    char other[sizeof(void *) * 8] = "";
    ncclEpGroup_t wrong = (ncclEpGroup_t)(void *)other;
    CHECK(ncclEpGroupDestroy(NULL) == NCCL_SUCCESS, "NULL is allowed");
    CHECK(ncclEpHandleDestroy(NULL) == NCCL_SUCCESS, "NULL is allowed");
    REFUSED(ncclEpGroupDestroy(wrong), INVALID_ARGUMENT, "expected a live group, got another");
    REFUSED(ncclEpHandleDestroy((ncclEpHandle_t)(void *)other), INVALID_ARGUMENT, "a live handle");
    REFUSED(ncclEpHandleMemSize(NULL, 1, NULL, &bytes, 4), INVALID_ARGUMENT, "group, got NULL");
    REFUSED(ncclEpInitHandle(&handle, NULL, 1, NULL, 4, NULL), INVALID_ARGUMENT, "group, got NULL");
    REFUSED(ncclEpUpdateHandle(NULL, NULL, NULL, NULL), INVALID_ARGUMENT, "handle, got NULL");
    REFUSED(ncclEpCreateHandle(&handle, NULL, 1, NULL, NULL, NULL, NULL), INVALID_ARGUMENT,
            "group, got NULL");
    REFUSED(ncclEpDispatch(NULL, NULL, NULL, NULL, NULL, NULL), INVALID_ARGUMENT,
            "ncclEpDispatch:");
    REFUSED(ncclEpCombine(NULL, NULL, NULL, NULL, NULL), INVALID_ARGUMENT, "ncclEpCombine:");
    REFUSED(ncclEpComplete(NULL, NULL, NULL), INVALID_ARGUMENT, "ncclEpComplete:");
    REFUSED(ncclEpMaskQuery(NULL, &number, NULL), INVALID_ARGUMENT, "ncclEpMaskQuery:");
    REFUSED(ncclEpMaskUpdate(NULL, &number, NULL), INVALID_ARGUMENT, "ncclEpMaskUpdate:");
    REFUSED(ncclEpMaskClean(NULL, NULL), INVALID_ARGUMENT, "ncclEpMaskClean:");
    REFUSED(ncclEpGetAsyncError(NULL, &number), INVALID_ARGUMENT, "ncclEpGetAsyncError:");
    REFUSED(ncclEpErrorClear(NULL), INVALID_ARGUMENT, "ncclEpErrorClear:");
    CHECK(!handle && !bytes && !number, "a refused call has written");
}
