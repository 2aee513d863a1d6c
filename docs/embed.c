/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libep inside a framework, valid C and C++. Ranks share only a key-value store, like the one that
 * frameworks use to start (here files in a folder). They run one layer forward and backward with
 * buffers of a fixed size. docs/embedding.md explains the rest.
 *
 *     cc embed.c $(pkg-config --cflags --libs ep) -o embed && ./embed
 */
#include <dirent.h>
#include <ep/ep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 3, TOKENS = 5, TOP_K = 2, EXPERTS = 8, HIDDEN = 12 };

static void check(EpStatus status) {
    if (status == EP_OK) return;
    fprintf(stderr, "%s\n%s\n", ep_status_string(status), ep_last_error());
    exit(1);
}

/* ---- a bootstrap over a store --------------------------------------------------------------- */

typedef struct Store {
    const char *folder;
    int32_t rank, size;
    long turn; /* number of gathers so far; each has its own keys */
} Store;

static void name_key(const Store *store, long turn, int32_t rank, char path[128]) {
    snprintf(path, 128, "%s/%ld.%d", store->folder, turn, (int)rank);
}

/* Write a value. Renaming the file makes the key appear only when its value is complete. */
static EpStatus put(const Store *store, const void *value, size_t bytes) {
    char path[128], unfinished[136];
    name_key(store, store->turn, store->rank, path);
    snprintf(unfinished, sizeof(unfinished), "%s.new", path);
    FILE *file = fopen(unfinished, "w");
    size_t written = file ? fwrite(value, 1, bytes, file) : 0;
    if (!file || fclose(file) || written < bytes || rename(unfinished, path))
        return ep_set_last_error(EP_ERR_BOOTSTRAP, "the store takes no keys");
    return EP_OK;
}

static int get(const Store *store, int32_t rank, void *value, size_t bytes) {
    char path[128];
    name_key(store, store->turn, rank, path);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t read = fread(value, 1, bytes, file);
    fclose(file);
    return read == bytes;
}

static EpStatus await(const Store *store, int32_t rank, void *value, size_t bytes, double end) {
    char sentence[96];
    while (!get(store, rank, value, bytes)) {
        EpStatus status = ep_poll_abort(); /* another thread may have aborted the group */
        if (status != EP_OK) return status;
        if ((double)time(NULL) > end) {
            snprintf(sentence, sizeof(sentence), "rank %d: store: rank %d did not arrive",
                     (int)store->rank, (int)rank);
            return ep_set_last_error(EP_ERR_TIMEOUT, sentence);
        }
        usleep(100);
    }
    return EP_OK;
}

/* A rank that has all values of this gather knows that every rank has read those of the previous
 * gather. So it deletes its own key of the previous gather. */
static EpStatus gather(void *context, const void *in, void *out, size_t bytes, double timeout) {
    Store *store = (Store *)context;
    char old[128];
    double end = (double)time(NULL) + timeout + 1;
    EpStatus status = put(store, in, bytes);
    for (int32_t r = 0; r < store->size && status == EP_OK; r++)
        status = await(store, r, (char *)out + (size_t)r * bytes, bytes, end);
    name_key(store, store->turn++ - 1, store->rank, old);
    if (status == EP_OK) unlink(old);
    return status;
}

static EpStatus barrier(void *context, double timeout) {
    char mine = 0, all[EP_MAX_RANKS];
    return gather(context, &mine, all, 1, timeout);
}

/* ---- a layer -------------------------------------------------------------------------------- */

/* What does not change between steps is set once, when the layer is created. */
typedef struct Layer {
    EpGroup *group;
    EpHandle *handle;
    int32_t first_expert, num_experts;
    int64_t rows;                                  /* receive capacity */
    int32_t counts[EXPERTS], offsets[EXPERTS + 1]; /* of each step's plan */
} Layer;

static Layer layer_new(const EpBootstrap *bootstrap) {
    Layer layer = {NULL, NULL, 0, 0, 0, {0}, {0}};
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = EXPERTS, config.max_tokens = TOKENS, config.max_top_k = TOP_K;
    config.max_row_bytes = HIDDEN * sizeof(float), config.alignment = 4;
    config.backend = EP_BACKEND_HOST; /* the tensors below are plain memory, even if GPUs exist */
    for (int32_t r = 0; r < bootstrap->size; r++) {
        int64_t rows;
        check(ep_max_recv_rows(&config, bootstrap->size, r, EP_LAYOUT_EXPERT_MAJOR, 0, &rows));
        layer.rows = rows > layer.rows ? rows : layer.rows;
    }
    config.max_recv_rows = layer.rows; /* equal on all ranks */
    check(ep_group_create(bootstrap, &config, &layer.group));
    check(ep_handle_create(layer.group, NULL, &layer.handle));
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    check(ep_group_query(layer.group, &info));
    layer.first_expert = info.first_expert, layer.num_experts = info.num_local_experts;
    return layer;
}

static float *rows_new(int64_t rows, int64_t width) {
    size_t bytes = ((size_t)(rows * width) * sizeof(float) + 63) / 64 * 64;
    return (float *)memset(aligned_alloc(64, bytes), 0, bytes);
}

/* Expert e multiplies by e + 1, and so does its derivative. */
static void run_experts(const Layer *layer, const float *in, float *out) {
    for (int32_t e = 0; e < layer->num_experts; e++)
        for (int64_t i = 0; i < (int64_t)layer->counts[e] * HIDDEN; i++) {
            int64_t at = (int64_t)layer->offsets[e] * HIDDEN + i;
            out[at] = (float)(layer->first_expert + e + 1) * in[at];
        }
}

static EpTensor matrix(const float *data, int64_t rows) {
    return ep_tensor_2d(data, EP_TYPE_FP32, rows, HIDDEN);
}

/* Run one step. A framework keeps for backward: the handle with its plan, weights and outputs. */
static int play(const EpBootstrap *bootstrap) {
    Layer layer = layer_new(bootstrap);
    int32_t idx[TOKENS * TOP_K];
    float weight[TOKENS * TOP_K], grad_weight[TOKENS * TOP_K];
    float *x = rows_new(TOKENS, HIDDEN), *y = rows_new(TOKENS, HIDDEN);
    float *grad_y = rows_new(TOKENS, HIDDEN), *grad_x = rows_new(TOKENS, HIDDEN);
    float *recv = rows_new(layer.rows, HIDDEN), *done = rows_new(layer.rows, HIDDEN);
    float *grad = rows_new(layer.rows, HIDDEN), *grad_recv = rows_new(layer.rows, HIDDEN);
    float *recv_weight = rows_new(layer.rows, 1), *grad_slot = rows_new(layer.rows, 1);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = (float)(bootstrap->rank + 1), grad_y[i] = 1;
    for (int i = 0; i < TOKENS * TOP_K; i++)
        idx[i] = (i / TOP_K + bootstrap->rank + 3 * (i % TOP_K)) % EXPERTS, weight[i] = 0.25f;
    EpTensor t_idx = ep_tensor_2d(idx, EP_TYPE_INT32, TOKENS, TOP_K);
    EpTensor t_weight = ep_tensor_2d(weight, EP_TYPE_FP32, TOKENS, TOP_K);
    EpTensor t_grad_weight = ep_tensor_2d(grad_weight, EP_TYPE_FP32, TOKENS, TOP_K);
    EpTensor t_x = matrix(x, TOKENS), t_y = matrix(y, TOKENS);
    EpTensor t_grad_y = matrix(grad_y, TOKENS), t_grad_x = matrix(grad_x, TOKENS);
    EpTensor t_recv = matrix(recv, layer.rows), t_done = matrix(done, layer.rows);
    EpTensor t_grad = matrix(grad, layer.rows), t_grad_recv = matrix(grad_recv, layer.rows);
    EpTensor t_recv_weight = ep_tensor_1d(recv_weight, EP_TYPE_FP32, layer.rows);
    EpTensor t_grad_slot = ep_tensor_1d(grad_slot, EP_TYPE_FP32, layer.rows);
    EpTensor t_counts = ep_tensor_1d(layer.counts, EP_TYPE_INT32, layer.num_experts);
    EpTensor t_offsets = ep_tensor_1d(layer.offsets, EP_TYPE_INT32, layer.num_experts + 1);
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.expert_counts = &t_counts, plan.expert_offsets = &t_offsets;

    /* Forward. On a GPU all calls are on one stream, and none waits for the host. */
    check(ep_prepare(layer.handle, NULL, &t_idx, NULL, NULL, &plan));
    check(ep_dispatch(layer.handle, NULL, NULL, &t_x, &t_weight, NULL, NULL, &t_recv,
                      &t_recv_weight, NULL, NULL));
    run_experts(&layer, recv, done);
    check(ep_combine(layer.handle, NULL, &t_done, &t_recv_weight, NULL, NULL, &t_y));

    /* Backward, on the same handle: it still holds the plan of the forward pass. */
    check(ep_combine_backward(layer.handle, NULL, &t_grad_y, &t_recv_weight, &t_done, NULL, &t_grad,
                              &t_grad_slot));
    run_experts(&layer, grad, grad_recv);
    check(ep_dispatch_backward(layer.handle, NULL, &t_grad_recv, &t_grad_slot, NULL, &t_grad_x,
                               &t_grad_weight));

    int wrong = 0;
    for (int t = 0; t < TOKENS; t++) {
        float factor = 0.25f * (float)(idx[2 * t] + 1 + idx[2 * t + 1] + 1);
        for (int h = 0; h < HIDDEN; h++) {
            wrong += y[t * HIDDEN + h] != factor * x[0];
            wrong += grad_x[t * HIDDEN + h] != factor;
        }
        for (int k = 0; k < TOP_K; k++)
            wrong += grad_weight[2 * t + k] != (float)(HIDDEN * (idx[2 * t + k] + 1)) * x[0];
    }
    check(ep_group_status(layer.group, NULL));
    printf("rank %d of %d: %d wrong\n", (int)bootstrap->rank, (int)bootstrap->size, wrong);
    float *const all[] = {x,    y,    grad_y,    grad_x,      recv,
                          done, grad, grad_recv, recv_weight, grad_slot};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        free(all[i]);
    ep_group_destroy(layer.group); /* also destroys its handles */
    return wrong != 0;
}

/* ---- ranks ---------------------------------------------------------------------------------- */

static int run_rank(const char *folder, int32_t rank) {
    Store store = {folder, rank, RANKS, 0};
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    bootstrap.rank = rank, bootstrap.size = RANKS, bootstrap.context = &store;
    bootstrap.allgather = gather, bootstrap.barrier = barrier;
    int wrong = play(&bootstrap);
    fflush(stdout);
    return wrong;
}

static void remove_all(const char *folder) {
    char path[400];
    DIR *keys = opendir(folder);
    for (struct dirent *key; keys && (key = readdir(keys));) {
        snprintf(path, sizeof(path), "%s/%s", folder, key->d_name);
        unlink(path);
    }
    if (keys) closedir(keys);
    rmdir(folder);
}

int main(void) {
    char folder[] = "/tmp/ep-embed-XXXXXX";
    int failed = 0, status;
    if (!mkdtemp(folder)) return 1;
    for (int32_t r = 0; r < RANKS; r++)
        if (fork() == 0) _exit(run_rank(folder, r));
    for (int r = 0; r < RANKS; r++)
        failed |= wait(&status) < 0 || status != 0;
    remove_all(folder);
    return failed;
}
