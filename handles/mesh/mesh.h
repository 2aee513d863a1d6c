/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_MESH_MESH_H
#define EP_HANDLES_MESH_MESH_H

/**
 * Meshes and specs (ep_mesh.h).
 *
 *     mesh.c        checks meshes, axes and specs; coordinates and groups of ranks
 *     sharding.c    shards of tensors, and what happens to a tensor in a step
 *     text.c        reads and writes meshes, axes and specs as text
 *     bootstrap.c   the bootstrap of a group, out of that of all ranks
 *     comm.c        the groups of a mesh's ranks that weights use (ep_weight.h)
 *
 * The first three are arithmetic. The other two connect ranks, with what bootstrap/ offers.
 */

#include "bootstrap/bootstrap.h"
#include "ep/ep_weight.h"

/** Check a caller's mesh and copy it. */
EpStatus ep_mesh_read(const EpCall *call, const EpMesh *given, EpMesh *out);

/** Check axes of a checked mesh: each is there, and none twice. */
EpStatus ep_axes_check(const EpCall *call, const EpMesh *mesh, const char *argument,
                       const EpAxes *axes);

/** Check a caller's spec of a checked mesh and copy it: no axis in two places. `tensor` names it in
 *  sentences. */
EpStatus ep_spec_read(const EpCall *call, const EpMesh *mesh, const char *tensor,
                      const EpSpec *given, EpSpec *out);

int ep_axes_have(const EpAxes *axes, int32_t axis);
void ep_axes_add(EpAxes *axes, int32_t axis);

/** The product of the sizes of checked axes. */
int32_t ep_axes_ranks(const EpMesh *mesh, const EpAxes *axes);

/** The place along `axes` of a rank with these coordinates, the first axis outermost. */
int32_t ep_axes_place(const EpMesh *mesh, const EpAxes *axes, const int32_t *coordinates);

/** The coordinates of a rank of a checked mesh. */
void ep_mesh_locate(const EpMesh *mesh, int32_t rank, int32_t *coordinates);

const char *ep_axis_role_name(EpAxisRole role);

/* ---- connected ranks ----------------------------------------------------------------------- */

#define EP_MESH_RENDEZVOUS_BYTES EP_RESERVED_BYTES

/** ep_bootstrap_mesh, with a deadline of its own. */
EpStatus ep_bootstrap_mesh_within(const EpBootstrap *world, const EpMesh *mesh, const EpAxes *axes,
                                  double timeout, EpBootstrap *out);

/** A group of this rank along some axes. */
typedef struct EpMeshLink {
    EpAxes along;
    EpBootstrap bootstrap;
    EpGroup *group;
    struct EpMeshLink *next;
} EpMeshLink;

struct EpMeshComm {
    EpObject object;
    EpBootstrap world;
    EpMesh mesh;
    int32_t *grid; /* the mesh's, or NULL */
    EpMeshCommConfig config;
    double timeout;
    void *gathered;        /* [world's ranks] of EP_MESH_RENDEZVOUS_BYTES */
    EpOwned *weights;      /* live ones */
    int32_t created;       /* number of weights so far, equal on all ranks */
    pthread_mutex_t mutex; /* of the next two, since any thread may abort */
    EpMeshLink *links;
    char *aborted; /* the sentence, or NULL */
};

/** Gather `bytes` bytes of every rank of the mesh into comm->gathered, in the world's order. They
 *  begin with an EpRankStatus; returns the first error in them. */
EpStatus ep_mesh_comm_gather(EpMeshComm *comm, const EpCall *call, const void *mine, size_t bytes);

/** Find this rank's group along axes. Collective over the mesh: the first call makes the group.
 *  *out stays the communicator's. */
EpStatus ep_mesh_comm_group(EpMeshComm *comm, const EpCall *call, const EpAxes *along,
                            EpGroup **out);

/** Add to the sentence of a group that has failed which ranks of the mesh it is of, since its
 *  sentences number its own ranks. Returns `status`. */
EpStatus ep_mesh_comm_explain(const EpMeshComm *comm, const EpGroup *group, EpStatus status);

/* ---- text ---------------------------------------------------------------------------------- */

/** Text that is being written: what does not fit is counted, and not written. */
typedef struct EpText {
    char *out;
    size_t bytes;  /**< of out */
    size_t length; /**< of the whole text, without the end */
} EpText;

void ep_text_add(EpText *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** "expert", "(fsdp,expert)", or "_". */
void ep_text_add_axes(EpText *text, const EpMesh *mesh, const EpAxes *axes);

#define EP_TEXT_BYTES 4096 /* of any text that libep writes about a mesh */

/** Give the text to the caller. EP_ERR_BUFFER_SIZE, and nothing is written, if it does not fit. */
EpStatus ep_text_deliver(const EpCall *call, const EpText *text, char *out, size_t bytes);

#define EP_AXES_TEXT_BYTES (EP_MESH_MAX_AXES * EP_AXIS_NAME_BYTES + 2)

/** The same, into a buffer that is large enough for any axes. Returns it. */
const char *ep_axes_text(const EpMesh *mesh, const EpAxes *axes, char out[EP_AXES_TEXT_BYTES]);

#endif
