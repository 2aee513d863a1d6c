/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_LAYER_H
#define MOE_LAYER_H

/**
 * One MoE layer on one rank: connections, weights, tensors.
 *
 * Letters: T tokens of this rank, H hidden, E experts, L experts of this rank, K per token, F
 * between an expert's matrices, `rows` slots received, padding included.
 */

#include "tools/common/world.h"
#include "tools/moe/device.h"
#include "tools/moe/inputs.h"
#include "tools/moe/mesh.h"

/** A weight as it is gathered for one direction, and as the GEMM takes it. */
typedef struct Gathered {
    EpWeightForm form;
    EpWeightSizes sizes;
    EpTensor full, scales; /**< what ep_weight_gather writes */
    EpTensor workspace;
    EpTensor values; /**< for the GEMM: `full`, or FP32 where it is dequantised; none for e4m3 */
    int64_t block_rows, block_columns; /**< that share a scale */
} Gathered;

typedef struct Weight {
    EpWeight *weight;
    EpSharding sharding;
    EpTensor shard, grad, grad_shard, reduce_workspace;
    Gathered forward;
    Gathered backward; /**< the same as forward, but where `two_forms` */
    bool two_forms;    /**< each direction has its own: blocks of rows, or products of e4m3 */
    bool turns;        /**< what is gathered is as backward takes it, and is transposed for forward:
                            tiles have the same bytes */
    bool twice;        /**< it is gathered for each direction */
    bool keeps;        /**< what is gathered stays until backward: no other layer shares it */
    bool whole;        /**< the shard is what the rank uses: there is nothing to gather */
} Weight;

/** The tensors; all of the layer's own. */
typedef enum TensorId {
    T_NONE,
    T_TOKENS,        /**< [T, H] */
    T_GRAD_OUT,      /**< [T, H] */
    T_OUT,           /**< [T, H] */
    T_GRAD_TOKENS,   /**< [T, H] */
    T_PROBS,         /**< [T, E] FP32, first the logits */
    T_GRAD_LOGITS,   /**< [T, E], of the type that products take */
    T_INDEX,         /**< [T, K] INT32 */
    T_TOPK,          /**< [T, K] FP32, weights */
    T_GRAD_TOPK,     /**< [T, K] FP32 */
    T_RECEIVED,      /**< [rows, H] */
    T_SLOT_WEIGHTS,  /**< [rows] FP32 */
    T_Z,             /**< [rows, 2F], gate and up */
    T_A,             /**< [rows, F], activation */
    T_Y,             /**< [rows, H], the experts' outputs */
    T_GRAD_Y,        /**< [rows, H] */
    T_GRAD_A,        /**< [rows, F] */
    T_GRAD_Z,        /**< [rows, 2F] */
    T_GRAD_RECEIVED, /**< [rows, H] */
    T_GRAD_SLOTS,    /**< [rows] FP32, of the slots' weights */
    T_SHARED_W1,     /**< [1, H, 2S], of the shared expert */
    T_SHARED_W2,     /**< [1, S, H] */
    T_SHARED_Z,      /**< [T, 2S] */
    T_SHARED_A,      /**< [T, S] */
    T_SHARED_Y,      /**< [T, H] */
    NUM_TENSORS
} TensorId;

typedef struct Layer {
    World *world;
    const struct Layer *lender; /**< whose device and groups it uses; NULL: its own */
    const struct Layer *below;  /**< in a stack, whose output this one takes; NULL: none */
    const MoeOptions *options;
    MoeMesh mesh;
    int64_t tokens, rows;
    int64_t received;  /**< rows of this rank, padding included; `rows` is a capacity on GPUs */
    int64_t slots;     /**< rows without padding */
    int32_t num_local; /**< L */
    EpBootstrap ep;    /**< of the EP group */
    EpGroupConfig group_config;
    EpHandleConfig handle_config;
    EpGroup *group;
    EpHandle *handle;
    EpMeshComm *comm;
    Weight weights[NUM_WEIGHTS];
    int64_t buffer_bytes; /**< that it has itself of weights_buffers */
    EpTensor tensors[NUM_TENSORS];
    /* Of the tensors of slots that products take as e4m3: their rows, for sums over a row, and
     * transposed, for sums over rows. */
    Scaled scaled[NUM_TENSORS], transposed[NUM_TENSORS];
    int32_t *first, *count; /**< of each local expert's slab */
    EpTensor places;        /**< both in the device's memory, where products take e4m3 */
    Groups experts;         /**< these slabs */
    int32_t all[2];         /**< 0 and T */
    Groups all_tokens;      /**< one slab of all tokens */
    MoeDevice device;
    double created;          /**< seconds that it took */
    int64_t gemm_calls;      /**< that multiply, in the last step that was timed */
    void *graph;             /**< of the step, where it is replayed; NULL: none */
    bool multiplies_e4m3;    /**< the products of w1 and w2 */
    bool dispatches_e4m3;    /**< dispatch quantises: no product takes the rows otherwise */
    bool fuses;              /**< the activation and its gradient quantise */
    bool overlaps;           /**< calls of w1 and w2 run beside dispatch: see step.c */
    EpStream weights_stream; /**< of all weights' calls: the device's stream, or its second one */
} Layer;

/**
 * Collective. False on every rank, with a message, if any rank fails. A layer may use the device,
 * the EP group and the communicators of another one, the lender, which is destroyed later: making
 * them takes seconds on GPUs. A layer of a stack has the one below as its lender, which has
 * computed its output. With the second one below it shares what is gathered and the gradients of
 * that.
 */
bool layer_create(World *world, const MoeOptions *options, const MoeMesh *mesh, const Layer *lender,
                  const Layer *below, Layer *out);
void layer_destroy(Layer *layer);

/** Collective: create the mesh's communicators and the weights, with their shards' contents. */
bool weights_create(Layer *layer);

/** Fill what calls of weights write with NaN, so that a step that reads it too early is wrong.
 * Later steps find what the one before has written, which is the same. */
bool weights_spoil(Layer *layer);

/** Bytes of what is gathered, of its gradients, and of workspaces, in a stack of layers: a layer
 *  shares with the second one below all but what it keeps. */
int64_t weights_buffers(const Layer *layer, int64_t layers);

/** Bytes of the largest workspace that one call of a weight takes: on one stream all may share it.
 */
int64_t weights_workspace(const Layer *layer);

/** Memory of the device for a tensor that describes its shape; false with a message. */
bool tensor_alloc(Layer *layer, EpTensor *tensor, const char *what);

/** The number of ranks that have a shard each of the weight as it is used. */
int moe_scattered_ranks(const Layer *layer, WeightId id);

#endif
