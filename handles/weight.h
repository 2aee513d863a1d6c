/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_WEIGHT_H
#define EP_HANDLES_WEIGHT_H

/**
 * Sharded weights (ep_weight.h).
 *
 *     weight.c        creates and destroys weights; their sizes in each form
 *     weight_calls.c  the three operations: checks arguments, describes what moves, and hands it to
 *                     the backend
 *     shards.h        where a rank's shard lies in the gathered weight
 *     host/weight*.c, cuda/weight*  the operations on each backend
 */

#include "handles/mesh/mesh.h"
#include "handles/shards.h"
#include "runtime/group.h"
#include "runtime/names.h"
#include "runtime/quant.h"

#define EP_WEIGHT_NAME_BYTES 64

/** So no number of bytes overflows: of EP_MAX_RANKS shards, in fp32, rounded up, and of the amaxes
 *  of blocks, of which a shard may touch four times as many as it has elements. */
#define EP_WEIGHT_MOST_ELEMENTS ((int64_t)1 << 48)

/**
 * What a rank of `reduces` adds. Ranks that keep the same shard (along sharding.summed) divide the
 * work where that saves traffic: each adds one piece of it, in fp32, and gives the sums to the
 * others. Else each adds the whole shard, piece 0.
 */
typedef struct EpReducedPart {
    int32_t shard, piece;
} EpReducedPart;

/** Opaque to callers. */
struct EpWeight {
    EpObject object;
    EpMeshComm *comm;
    EpOwned owned; /* by comm */
    char name[EP_WEIGHT_NAME_BYTES];
    int32_t number; /* equal on all ranks */
    EpWeightConfig config;
    EpSharding sharding;
    EpShards shards;
    EpGroup *gathers;       /* along sharding.scattered, in the order of the shards */
    EpGroup *reduces;       /* along sharding.scattered and .summed, in the mesh's order */
    EpGroup *maximises[2];  /* for EP_AMAX_TENSOR and EP_AMAX_EXPERT */
    EpGroup *replicates;    /* along sharding.summed; NULL: sums are not divided */
    EpReducedPart *reduced; /* [ranks of reduces] */
};

/** A checked form, with its sizes. */
typedef struct EpWeightView {
    EpWeightForm form;
    EpQuantFormat format; /* of form.quant */
    EpWeightSizes sizes;
    EpShards shards;  /* of the gathered weight, in the form's order of dimensions */
    EpShards codes;   /* the same in elements of the tensor that is gathered */
    int64_t block[3]; /* elements of a block of one scale, in that order */
    int straddles;    /* whether some block lies in several shards */
} EpWeightView;

/** A gather that has been checked. */
typedef struct EpWeightGather {
    const EpWeight *weight;
    const EpWeightView *view;
    const void *shard;
    void *workspace, *out, *scales;
    EpStream stream;
} EpWeightGather;

typedef struct EpWeightReduce {
    const EpWeight *weight;
    const void *grad;
    int accumulate;
    void *workspace, *out;
    EpStream stream;
} EpWeightReduce;

typedef struct EpWeightAmax {
    const EpWeight *weight;
    EpAmaxScope scope;
    EpGroup *group;
    float *amax;
    int64_t count;
    EpStream stream;
} EpWeightAmax;

/** Returns a number for a form: ranks that gather in different forms differ in it. */
static inline int64_t ep_weight_form_code(const EpWeightForm *form) {
    EpBlocks blocks = form->quant == EP_QUANT_NONE ? EP_BLOCKS_ROWS : form->blocks;
    return ep_form_code(form->quant, blocks, form->transposed, form->by_rank);
}

/** Elements from piece to piece of a shard; the last ones may be shorter, or empty. */
int64_t ep_weight_piece_stride(const EpWeight *weight);

/** Elements of a piece. */
int64_t ep_weight_piece_length(const EpWeight *weight, int32_t piece);

/** Check a form (NULL: the shards' type) and work its sizes out. */
EpStatus ep_weight_view(const EpCall *call, const EpWeight *weight, const EpWeightForm *given,
                        EpWeightView *out);

/** The number of scales along a dimension of the gathered weight. */
int64_t ep_view_blocks(const EpWeightView *view, int dim);

/** Bytes for the amaxes of all blocks, then for what each shard has found; 0 where no block lies in
 *  several shards. */
int64_t ep_view_amax_bytes(const EpWeightView *view);

/** The most blocks along a dimension that have elements of one shard. */
int64_t ep_view_touched(const EpWeightView *view, int dim);

#endif
