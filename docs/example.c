/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A first program, valid C and C++. Each rank sends 4 tokens to 2 of 8 experts. Expert e multiplies
 * its rows by e + 1. Each rank gets the weighted sums of the outputs back.
 *
 *     cc example.c $(pkg-config --cflags --libs ep-mpi) -o example && mpirun -n 2 ./example
 */
#include <ep/ep_mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 4, TOP_K = 2, EXPERTS = 8, HIDDEN = 16 };

static void check(EpStatus status) {
    if (status != EP_OK) {
        fprintf(stderr, "%s\n%s\n", ep_status_string(status), ep_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* The experts. Here they multiply by a number; a real program runs grouped GEMMs. */
static void run_experts(const EpHandleInfo *info, int32_t first_expert, float *rows) {
    for (int32_t e = 0; e < info->num_local_experts; e++)
        for (int64_t i = 0; i < (int64_t)info->expert_counts[e] * HIDDEN; i++)
            rows[(int64_t)info->expert_offsets[e] * HIDDEN + i] *= (float)(first_expert + e + 1);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    check(ep_bootstrap_mpi(MPI_COMM_WORLD, &bootstrap));
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = EXPERTS, config.max_tokens = TOKENS, config.max_top_k = TOP_K;
    config.max_row_bytes = HIDDEN * sizeof(float), config.alignment = 4;
    config.backend = EP_BACKEND_HOST; /* the tensors below are plain memory, even if GPUs exist */
    EpGroup *group = NULL;
    EpHandle *layer = NULL;
    check(ep_group_create(&bootstrap, &config, &group));
    check(ep_handle_create(group, NULL, &layer));

    /* Rows must start on 16 bytes. */
    float *x = (float *)aligned_alloc(64, TOKENS * HIDDEN * sizeof(float));
    float *y = (float *)aligned_alloc(64, TOKENS * HIDDEN * sizeof(float));
    float weights[TOKENS * TOP_K];
    int32_t idx[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = (float)(bootstrap.rank + 1);
    for (int i = 0; i < TOKENS * TOP_K; i++)
        idx[i] = (3 * i + bootstrap.rank) % EXPERTS, weights[i] = 0.5f;

    EpTensor topk_idx = ep_tensor_2d(idx, EP_TYPE_INT32, TOKENS, TOP_K);
    check(ep_prepare(layer, NULL, &topk_idx, NULL, NULL, NULL));
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    check(ep_handle_info(layer, &info)); /* exact sizing: read the number of rows */
    int64_t rows = info.recv_rows;
    float *recv = (float *)aligned_alloc(64, (size_t)(rows * HIDDEN + 16) * sizeof(float));
    float *recv_w = (float *)malloc((size_t)(rows + 1) * sizeof(float));
    EpTensor tokens = ep_tensor_2d(x, EP_TYPE_FP32, TOKENS, HIDDEN);
    EpTensor topk_weights = ep_tensor_2d(weights, EP_TYPE_FP32, TOKENS, TOP_K);
    EpTensor recv_tokens = ep_tensor_2d(recv, EP_TYPE_FP32, rows, HIDDEN);
    EpTensor recv_weights = ep_tensor_1d(recv_w, EP_TYPE_FP32, rows);
    EpTensor out = ep_tensor_2d(y, EP_TYPE_FP32, TOKENS, HIDDEN);
    check(ep_dispatch(layer, NULL, NULL, &tokens, &topk_weights, NULL, NULL, &recv_tokens,
                      &recv_weights, NULL, NULL));
    EpGroupInfo me = EP_GROUP_INFO_INIT;
    check(ep_group_query(group, &me));
    run_experts(&info, me.first_expert, recv);
    check(ep_combine(layer, NULL, &recv_tokens, &recv_weights, NULL, NULL, &out));

    int wrong = 0;
    for (int t = 0; t < TOKENS; t++) {
        float expected = 0.5f * x[0] * (float)(idx[2 * t] + 1 + idx[2 * t + 1] + 1);
        for (int h = 0; h < HIDDEN; h++)
            wrong += y[t * HIDDEN + h] != expected;
    }
    printf("rank %d of %d: %lld rows received, %d wrong\n", me.rank, me.size, (long long)rows,
           wrong);
    free(recv), free(recv_w), free(x), free(y);
    ep_handle_destroy(layer);
    ep_group_destroy(group);
    ep_bootstrap_destroy(&bootstrap);
    MPI_Finalize();
    return wrong != 0;
}
