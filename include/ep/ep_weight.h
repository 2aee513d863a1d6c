/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_WEIGHT_H
#define EP_EP_WEIGHT_H

/**
 * Sharded weights: FSDP beside expert parallelism.
 *
 * Ranks of a mesh store shards of weights (ep_mesh.h). For use a weight is gathered over its fsdp
 * axes, in its own type or quantised; afterwards its gradient is reduce-scattered back to shards.
 *
 *     EpMeshComm *comm;     ep_mesh_comm_create(&world, &mesh, NULL, &comm);
 *
 *     EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
 *     config.name = "layers.3.w1", config.kind = EP_TENSOR_EXPERT_WEIGHT;
 *     ep_spec_parse(&mesh, "expert,fsdp,_", &config.spec);
 *     config.shape[0] = 256, config.shape[1] = 7168, config.shape[2] = 4096;
 *     EpWeight *w1;         ep_weight_create(comm, &config, &w1);
 *
 *     ep_weight_gather(w1, NULL, &shard, NULL, stream, &full, NULL);
 *     ... the layer, forward and backward ...
 *     ep_weight_reduce(w1, &grad_full, 0, &workspace, stream, &grad_shard);
 *
 * The rules of ep.h hold: calls are collective over the ranks concerned, in the same order on each;
 * a refused call took no part and left its outputs unchanged; operations allocate nothing, but
 * ep_weight_move its plan; on the host backend a call has finished when it returns. docs/mesh.md
 * says which ranks are concerned, what NCCL, which moves the bytes between nodes of GPUs, does not
 * do, and what must hold where these calls run beside the operations of an EP group, on another
 * stream.
 */

#include "ep/ep_mesh.h"
#include "ep/ep_quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The ranks of a mesh, connected -------------------------------------------------------- */

/**
 * The communicators of a mesh: one for each list of axes that some weight needs, made when the
 * first such weight is created and shared by all. Opaque.
 */
typedef struct EpMeshComm EpMeshComm;

/** Fields marked = must have the same value on every rank. */
typedef struct EpMeshCommConfig {
    size_t struct_size;
    EpBackend backend;      /**< = AUTO, HOST or CUDA */
    int32_t device;         /**< this rank's CUDA device, or EP_DEFAULT, as in EpGroupConfig */
    double timeout_seconds; /**< deadline of waits, > 0, those of ep_mesh_comm_create, too;
                                 EP_DEFAULT: setting LIBEP_TIMEOUT */
} EpMeshCommConfig;

#define EP_MESH_COMM_CONFIG_INIT \
    { sizeof(EpMeshCommConfig), EP_BACKEND_AUTO, EP_DEFAULT, EP_DEFAULT }

/**
 * Connect the ranks of a mesh. Collective over `world`, all ranks with the same mesh.
 *
 * world   must outlive the result
 * config  may be NULL
 * EP_ERR_MISMATCH: ranks gave different meshes. EP_ERR_RANGE: a mesh of another number of ranks.
 */
EpStatus ep_mesh_comm_create(const EpBootstrap *world, const EpMesh *mesh,
                             const EpMeshCommConfig *config, EpMeshComm **out);

/** End all waits of this rank in its weights' operations; see ep_group_abort. By any thread. */
EpStatus ep_mesh_comm_abort(EpMeshComm *comm, const char *sentence);

/**
 * Whether the ranks can go on, as ep_group_status says of a group: EP_OK, or the failure of the
 * first group that has failed, with its sentence. On the CUDA backend operations fail after their
 * calls have returned: ask once the stream has finished. Local; waits for nothing.
 */
EpStatus ep_mesh_comm_status(EpMeshComm *comm);

/** Destroy the communicators and all weights of this rank. Collective over the mesh. NULL is
 *  allowed. */
void ep_mesh_comm_destroy(EpMeshComm *comm);

/* ---- Weights ------------------------------------------------------------------------------- */

/** A weight: a configuration that the operations below share. It owns no tensor. Opaque. */
typedef struct EpWeight EpWeight;

/** All fields must have the same value on every rank. */
typedef struct EpWeightConfig {
    size_t struct_size;
    const char *name;                /**< for sentences, as "layers.3.w1"; copied */
    EpTensorKind kind;               /**< WEIGHT or EXPERT_WEIGHT */
    EpSpec spec;                     /**< at most EP_MAX_DIMS dimensions */
    int64_t shape[EP_SPEC_MAX_DIMS]; /**< of the whole tensor, [spec.ndim]; at most 2^48 elements */
    EpType type;                     /**< of shards: BF16, FP16 or FP32 */
    EpType grad_type;                /**< of gradients of the gathered weight, likewise */
    EpType reduced_type;             /**< of gradients of shards: grad_type or FP32 */
} EpWeightConfig;

#define EP_WEIGHT_CONFIG_INIT                                                                   \
    {                                                                                           \
        sizeof(EpWeightConfig), NULL, EP_TENSOR_EXPERT_WEIGHT, EP_SPEC_INIT, {0}, EP_TYPE_BF16, \
            EP_TYPE_BF16, EP_TYPE_FP32                                                          \
    }

/**
 * Create a weight. Collective over the mesh, in the same order on all ranks: it may make
 * communicators. The caller destroys it, or ep_mesh_comm_destroy does.
 *
 * EP_ERR_MISMATCH: ranks gave different configurations; the sentence names the field. EP_ERR_RANGE:
 * more than 2^48 elements, a size of 0 counted as 1. EP_ERR_SHAPE and EP_ERR_UNSUPPORTED: as
 * ep_sharding.
 */
EpStatus ep_weight_create(EpMeshComm *comm, const EpWeightConfig *config, EpWeight **out);

/** Local, at any time. NULL is allowed. */
void ep_weight_destroy(EpWeight *weight);

/** What happens to the weight; see ep_sharding. Local. */
EpStatus ep_weight_sharding(const EpWeight *weight, EpSharding *out);

/**
 * The form in which a weight is gathered.
 *
 * Quantised weights are e4m3 bytes and scales, by the arithmetic of dispatch (docs/semantics.md).
 * Each rank quantises its shard, and the bytes travel. The result equals, bit by bit, quantising
 * the gathered weight. Matrix units read fp8 along the dimension that a product sums over. So a
 * layer gathers a weight [E, in, out] `transposed` for the forward pass, [E, out, in], and as it is
 * for the gradient of the input. With tiles both have the same bytes and scales, transposed.
 *
 * EP_ERR_UNSUPPORTED: a form that its fields exclude below, tiles with MXFP8, or tiles or
 * transposing of a weight of one dimension.
 */
typedef struct EpWeightForm {
    size_t struct_size;
    EpQuant quant;      /**< EP_QUANT_NONE: in the shards' type */
    EpBlocks blocks;    /**< where quant is not NONE */
    int32_t transposed; /**< 1: the last two dimensions are swapped; where quant is not NONE */
    int32_t by_rank;    /**< 1: the shards of the gathered ranks one after the other, instead of the
                             weight; where quant is NONE. The first dimension is multiplied by the
                             number of these ranks */
} EpWeightForm;

#define EP_WEIGHT_FORM_INIT \
    { sizeof(EpWeightForm), EP_QUANT_NONE, EP_BLOCKS_ROWS, 0, 0 }

/** Shapes and bytes of a gathered weight. */
typedef struct EpWeightSizes {
    size_t struct_size;
    int32_t ndim;
    EpType type;                      /**< of the gathered weight */
    int64_t shape[EP_MAX_DIMS];       /**< likewise, [ndim] */
    EpType scale_type;                /**< FP32 or UINT8 (UE8M0), where it is quantised */
    int64_t scale_shape[EP_MAX_DIMS]; /**< [ndim], row-major; 0 elements where it is not */
    int64_t gather_workspace;         /**< bytes that ep_weight_gather needs */
    int64_t reduce_workspace;         /**< bytes that ep_weight_reduce needs */
} EpWeightSizes;

#define EP_WEIGHT_SIZES_INIT \
    { sizeof(EpWeightSizes), 0, EP_TYPE_BF16, {0}, EP_TYPE_FP32, {0}, 0, 0 }

/** Sizes of this rank's tensors and workspaces. `form` may be NULL: the shards' type. Local. */
EpStatus ep_weight_sizes(const EpWeight *weight, const EpWeightForm *form, EpWeightSizes *out);

/**
 * Gather a weight for use. Collective over the ranks of EpSharding.scattered.
 *
 * form       may be NULL: the shards' type
 * shard      EpSharding.stored, of the weight's type
 * workspace  UINT8, [>= gather_workspace] on a multiple of 64 bytes; may be NULL if that is 0. It
 *            holds nothing between calls: weights may share it on one stream.
 * out        EpWeightSizes.shape
 * scales     EpWeightSizes.scale_shape, on 4 bytes; NULL where nothing is quantised, else
 *            EP_ERR_UNSUPPORTED
 * EP_ERR_ORDER: ranks gather different weights, or in different forms; fails the communicator.
 */
EpStatus ep_weight_gather(EpWeight *weight, const EpWeightForm *form, const EpTensor *shard,
                          const EpTensor *workspace, EpStream stream, const EpTensor *out,
                          const EpTensor *scales);

/**
 * Reduce gradients to shards: the sum, over all ranks that have a part of it, of this rank's
 * shard. Collective over the ranks of EpSharding.scattered and .summed.
 *
 * Within a node, parts are added in fp32 in ascending rank of that group, from +0; then the nodes'
 * sums in fp32, in ascending order of their lowest rank. With `accumulate` the total is added to
 * what is there. The result is rounded once.
 *
 * grad        EpSharding.used, of grad_type
 * accumulate  0 or 1
 * workspace   as above, reduce_workspace
 * out         EpSharding.stored, of reduced_type
 */
EpStatus ep_weight_reduce(EpWeight *weight, const EpTensor *grad, int accumulate,
                          const EpTensor *workspace, EpStream stream, const EpTensor *out);

/** What has one scale. */
typedef enum EpAmaxScope {
    EP_AMAX_TENSOR = 1, /**< the weight: one number */
    EP_AMAX_EXPERT = 2  /**< each expert of the shard: EpSharding.stored[0] numbers. Of weights of
                             the experts alone */
} EpAmaxScope;

/**
 * Reduce magnitudes to their maximum, in place: amax is FP32, [1] or [stored[0]], each >= 0. NaN
 * wins. Collective over the ranks of EpSharding.amax, or of .amax_per_expert.
 *
 * EP_ERR_UNSUPPORTED: EP_AMAX_EXPERT of a weight outside the experts, which has no such numbers:
 * its first dimension is not one of experts.
 */
EpStatus ep_weight_amax(EpWeight *weight, EpAmaxScope scope, EpStream stream, const EpTensor *amax);

/* ---- Experts to a new placement ------------------------------------------------------------ */

#define EP_MAX_MOVED 64 /**< tensors of a call */

/**
 * Move experts' weights from one placement of a group with num_physical to another, so that each
 * place holds what ep_group_place will say. An operation of the group: collective, and in the order
 * of its operations. What an expert has is bytes: weights, scales and codes of any type, whole or
 * shards. Sharded experts move in the group of the expert axes, each shard among its likes.
 *
 * from         [P] in host memory: the map by which weights lie now; -1: the place holds none
 * to           [P] likewise: where they shall lie. Both are read before the call returns. They are
 *              equal on all ranks
 * weights      [num_weights] tensors [L, ...] of 1 to 3 dimensions: row i is of this rank's i-th
 *              place. All ranks have the same tensors, but for L. In place none overlaps another
 * num_weights  1 .. EP_MAX_MOVED
 * workspace    UINT8 on a multiple of 64 bytes, as long on all ranks; needed in place, else ignored
 * out          [num_weights] tensors like `weights`: none overlaps a weight or another of them.
 *              NULL: in place
 *
 * With `out` every place of `to` is written there, those that stay, too; rows of places with -1 are
 * left alone. `weights` stay as they are, so steps that use them may run meanwhile, in another
 * group, since a group's own operations follow each other. Engines that keep such a second set of a
 * layer's weights, as EPLB does, then swap the sets or copy, and call ep_group_place.
 *
 * In place, rows move through the workspace, a part of each at a time: it holds as many bytes of
 * each row as fit once for each place that changes, on the rank where most do. 64 bytes for each of
 * the ceil(P / R) places are always enough; some MB for each are fast. A move that fails leaves
 * `weights` undefined, on any rank: with masks, where it may be repeated, use `out`.
 *
 * Each place takes its expert from a copy on the same rank if there is one, else on the same node,
 * else from any. Of several, the rank gives it that gives fewest so far. A rank that needs an
 * expert twice gets it once. In a group with masks, masked ranks give and get nothing; while a rank
 * is cut it returns EP_ERR_TIMEOUT.
 *
 * The operation can be captured: a graph keeps the maps, and the set of ranks that take part. If
 * a rank with whose rows it deals has been masked since, a replay suspends the group. On several
 * nodes of GPUs, NCCL connects two ranks when the first expert moves between them, which may take a
 * second.
 *
 * EP_ERR_ROUTING: an expert that `to` names has no copy in `from` on a rank that takes part; the
 * sentence names it, and nothing is written. EP_ERR_RANGE: entries below -1 or >= E.
 * EP_ERR_BUFFER_SIZE: a workspace that is too small. EP_ERR_ADDRESS: tensors that overlap.
 * EP_ERR_ORDER: ranks differ in maps, sizes of weights or workspace; it ends the group.
 * EP_ERR_NO_MEMORY: for the plan, which is freed at the end. EP_ERR_UNSUPPORTED: the group has no
 * num_physical.
 */
EpStatus ep_weight_move(EpGroup *group, const int32_t *from, const int32_t *to,
                        const EpTensor *weights, int32_t num_weights, const EpTensor *workspace,
                        EpStream stream, const EpTensor *out);

#ifdef __cplusplus
}
#endif

#endif
