/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_MESH_H
#define EP_EP_MESH_H

/**
 * Meshes: expert parallelism beside FSDP and data parallelism.
 *
 * A mesh arranges the ranks of a program along named axes. A spec says which axes shard each
 * dimension of a tensor. From both follow the groups of a rank, its shard of a tensor, and what
 * happens to the tensor in a step: what is gathered, what stays sharded, where gradients are
 * summed.
 *
 *     EpMesh mesh = EP_MESH_INIT;
 *     ep_mesh_parse("data=2,fsdp=2,expert=4", &mesh);
 *
 *     EpAxes expert;                                    the EP group of this rank
 *     ep_mesh_role_axes(&mesh, EP_AXIS_EXPERT, &expert);
 *     EpBootstrap ep = EP_BOOTSTRAP_INIT;
 *     ep_bootstrap_mesh(&world, &mesh, &expert, &ep);
 *     ep_group_create(&ep, &config, &group);
 *
 *     EpSpec spec = EP_SPEC_INIT;                       a weight of the experts, [E, in, out]
 *     ep_spec_parse(&mesh, "expert,fsdp,_", &spec);
 *     EpSharding w1 = EP_SHARDING_INIT;
 *     ep_sharding(&mesh, &spec, EP_TENSOR_EXPERT_WEIGHT, "w1", shape, &w1);
 *
 * `ep_info --mesh ... --spec ...` prints the same for any mesh, without starting ranks.
 * docs/mesh.md explains the rules. All calls are local, apart from ep_bootstrap_mesh, and need no
 * group. A refused call leaves its outputs unchanged. Statuses are those of ep.h; the comments name
 * the others.
 */

#include "ep/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Meshes -------------------------------------------------------------------------------- */

#define EP_MESH_MAX_AXES 16
#define EP_AXIS_NAME_BYTES 32

/** What ranks along an axis do. */
typedef enum EpAxisRole {
    EP_AXIS_OTHER =
        1, /**< anything else, as tensor or pipeline parallelism: libep leaves it alone */
    EP_AXIS_DATA = 2,  /**< they have other tokens and the same weights */
    EP_AXIS_FSDP = 3,  /**< they have other tokens and other shards of the weights */
    EP_AXIS_EXPERT = 4 /**< they have other tokens and other experts */
} EpAxisRole;

typedef struct EpAxis {
    char name[EP_AXIS_NAME_BYTES]; /**< letters, digits and '_', not '_' alone; each name once */
    int32_t size;                  /**< >= 1 */
    EpAxisRole role;
} EpAxis;

/** An ordered list of axes: indices into EpMesh.axes, outermost first, each once. Never grows. */
typedef struct EpAxes {
    int32_t num;
    int32_t axis[EP_MESH_MAX_AXES];
} EpAxes;

typedef struct EpMesh {
    size_t struct_size;
    int32_t num_axes;
    EpAxis axes[EP_MESH_MAX_AXES]; /**< outermost first */
    /** [product of all sizes]: the rank at each position, row-major, each rank once. NULL: the
     *  position is the rank. The caller's; it must outlive the mesh. */
    const int32_t *grid;
} EpMesh;

#define EP_MESH_INIT \
    { sizeof(EpMesh), 0, {{"", 0, EP_AXIS_OTHER}}, NULL }

/**
 * Read a mesh from text: axes "name=size" or "name:role=size", outermost first, with commas
 * between: "data=2,fsdp=2,expert=4", "dp:data=2,ep:expert=8". Without a role, an axis whose name is
 * a role's (data, fsdp, expert) has that role, and any other axis has the role other.
 * EP_ERR_RANGE.
 */
EpStatus ep_mesh_parse(const char *text, EpMesh *out);

/** The number of ranks: the product of all sizes, up to INT32_MAX. *ranks is an output. */
EpStatus ep_mesh_ranks(const EpMesh *mesh, int32_t *ranks);

/** Read axes from text: "expert", "(fsdp,expert)", and "_" or "()" for none. EP_ERR_RANGE: an axis
 *  that the mesh does not have, or one named twice. */
EpStatus ep_mesh_axes(const EpMesh *mesh, const char *text, EpAxes *out);

/** All axes of a role, in the mesh's order. The EP group is that of the role EP_AXIS_EXPERT. */
EpStatus ep_mesh_role_axes(const EpMesh *mesh, EpAxisRole role, EpAxes *out);

/** A rank's place along each axis: coordinates [mesh->num_axes]. */
EpStatus ep_mesh_coordinates(const EpMesh *mesh, int32_t rank, int32_t *coordinates);

/**
 * The group of a rank along `axes`: the ranks whose coordinates on all other axes equal its own.
 * They are ordered by `axes`, the first one outermost. No axes: the rank alone.
 *
 * size   how many ranks the group has. May be NULL, as the next two.
 * place  this rank's number in the group
 * ranks  [size]: the mesh's ranks in the group, in its order
 */
EpStatus ep_mesh_group(const EpMesh *mesh, const EpAxes *axes, int32_t rank, int32_t *size,
                       int32_t *place, int32_t *ranks);

/**
 * Make a bootstrap for this rank's group along `axes`, out of the bootstrap of all ranks of the
 * mesh. Collective over `world`: all ranks call it with the same mesh and the same axes, and fields
 * that differ are EP_ERR_MISMATCH on all. `world` must outlive the result and its groups.
 * Each wait ends after LIBEP_TIMEOUT's seconds.
 *
 * If `world` has messages (isend and the others: MPI and threads), the groups are independent from
 * then on. If not (NCCL, or a caller's own without them), each callback gathers over the whole
 * world: then all groups along these axes create, destroy and allocate together.
 */
EpStatus ep_bootstrap_mesh(const EpBootstrap *world, const EpMesh *mesh, const EpAxes *axes,
                           EpBootstrap *out);

/* ---- Specs of tensors ---------------------------------------------------------------------- */

#define EP_SPEC_MAX_DIMS 8

/** For each dimension of a tensor, the axes that shard it. */
typedef struct EpSpec {
    size_t struct_size;
    int32_t ndim; /**< >= 1 */
    EpAxes dims[EP_SPEC_MAX_DIMS];
} EpSpec;

#define EP_SPEC_INIT         \
    {                        \
        sizeof(EpSpec), 0, { \
            {                \
                0, {         \
                    0        \
                }            \
            }                \
        }                    \
    }

/** Read a spec from text: for each dimension "_" or "()" (not sharded), an axis, or axes in
 *  parentheses: "(fsdp,expert),_,_". EP_ERR_RANGE. */
EpStatus ep_spec_parse(const EpMesh *mesh, const char *text, EpSpec *out);

/** Write a spec as text. EP_ERR_BUFFER_SIZE. */
EpStatus ep_spec_format(const EpMesh *mesh, const EpSpec *spec, char *out, size_t bytes);

/**
 * A rank's shard: elements [begin[d], begin[d] + local[d]) of each dimension d.
 *
 * tensor  the tensor's name, for sentences, as "layers.3.w1"
 * shape   [ndim], of the whole tensor, each >= 0
 * begin   [ndim]; may be NULL, as local
 * local   [ndim]
 * EP_ERR_SHAPE: a dimension does not divide by the sizes of its axes.
 */
EpStatus ep_spec_shard(const EpMesh *mesh, const EpSpec *spec, const char *tensor,
                       const int64_t *shape, int32_t rank, int64_t *begin, int64_t *local);

/* ---- What happens to a tensor in a step ---------------------------------------------------- */

/** What a tensor is in a model. */
typedef enum EpTensorKind {
    EP_TENSOR_WEIGHT = 1,        /**< outside the experts */
    EP_TENSOR_EXPERT_WEIGHT = 2, /**< [E, ...]: the experts are the first dimension */
    EP_TENSOR_ACTIVATION = 3     /**< tokens are the first dimension */
} EpTensorKind;

typedef struct EpSharding {
    size_t struct_size;
    int32_t ndim;
    int64_t stored[EP_SPEC_MAX_DIMS];  /**< shape of a rank's shard, of its gradient, too */
    int64_t used[EP_SPEC_MAX_DIMS];    /**< shape that a rank computes with */
    EpAxes gathered[EP_SPEC_MAX_DIMS]; /**< per dimension: axes over which it is gathered for use */
    EpAxes kept[EP_SPEC_MAX_DIMS];     /**< per dimension: axes that shard it in use, too */
    /** The gradient of what was used is reduce-scattered over all gathered axes, to the shard. */
    EpAxes scattered;
    /** The same sum goes over these axes, too: their ranks have the same shard and other tokens. */
    EpAxes summed;
    EpAxes amax;            /**< one scale for the tensor: its amax is max-reduced over these */
    EpAxes amax_per_expert; /**< one scale per expert; of tensors without experts the same as amax,
                                 and ep_weight_amax refuses EP_AMAX_EXPERT for them */
} EpSharding;

#define EP_SHARDING_INIT                                                                         \
    {                                                                                            \
        sizeof(EpSharding), 0, {0}, {0}, {{0, {0}}}, {{0, {0}}}, {0, {0}}, {0, {0}}, {0, {0}}, { \
            0, {                                                                                 \
                0                                                                                \
            }                                                                                    \
        }                                                                                        \
    }

/**
 * What happens to a tensor in a step. `tensor` and `shape` are as for ep_spec_shard.
 *
 * A weight: a dimension that an fsdp axis shards is gathered over all axes that shard it. An expert
 * weight: the expert axes shard the first dimension and stay; fsdp axes shard it within them, or
 * other dimensions, and are gathered. An activation: nothing is gathered.
 *
 * EP_ERR_SHAPE: a dimension does not divide. EP_ERR_UNSUPPORTED: axes that the tensor's kind
 * cannot have there; the sentence names the tensor, the dimension and the axes.
 */
EpStatus ep_sharding(const EpMesh *mesh, const EpSpec *spec, EpTensorKind kind, const char *tensor,
                     const int64_t *shape, EpSharding *out);

/** Write a sharding in words, several lines. EP_ERR_BUFFER_SIZE: 4096 bytes are always enough. */
EpStatus ep_sharding_format(const EpMesh *mesh, const EpSharding *sharding, char *out,
                            size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
