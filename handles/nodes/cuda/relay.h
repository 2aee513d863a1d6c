/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_HANDLES_NODES_CUDA_RELAY_H
#define EP_HANDLES_NODES_CUDA_RELAY_H

/**
 * Several nodes on GPUs: NCCL moves rows between nodes, libep's kernels move them within each.
 *
 *     scatter   tokens ── pack ──► send ══ network ══► recv ── scatter ──► slots of the node
 *                  └───────────────── scatter ──────────────────────────► slots of the own node
 *
 *     gather    slots ── gather ──► send ══ network ══► recv ─┐
 *               slots ─────────────────────────────────────── gather ──► the token's sum
 *
 * The work goes chunk by chunk (EpNodeSizes.chunk tokens of each rank) on two streams that events
 * join: the caller's, on which libep's kernels run one after the other, and one for NCCL. Each
 * stage has two buffers, so chunk c + 1 crosses the network while the node's kernels move chunk c.
 * Kernels that share the GPU's multiprocessors take as long together as one after the other, but
 * the one that NCCL waits for then ends last: so packing has no stream of its own.
 *
 * A message has a slot for each token of a chunk, filled from the first one on by the tokens that
 * the other node needs. All slots are sent, whatever the routing is: so both ends know the size
 * without asking, no call waits on the host, and all of it can be captured. With exact sizing the
 * host knows the routing's numbers before it makes room for the rows, so there only filled slots
 * are sent, of the chunks that any rank has tokens in: if the plan is the handle's own, outside of
 * captures.
 *
 * With a limit (EpNodeSizes.limit) the places of all messages to a node are numbered through, and
 * message c has the c-th part of them: of any chunk's tokens, whose numbers are not below those of
 * their places. So a chunk is packed from the tokens from there on. A gather keeps all messages,
 * and sums a chunk's tokens once the message is here that has the place of its last token's number.
 *
 * No kernel waits for the network, so there is no circular wait, however few multiprocessors are
 * free. Order all stages of an operation by their chunk: first packing or the sum of the relays,
 * then the exchange, then what reads it. A kernel of chunk c starts once the exchanges that it
 * needs are complete on its own rank: that of c, if it reads the rows (with a limit a later one,
 * whose stages then all come before it), and that of c - 2, whose buffers are used again. Then it
 * waits for the same kernel of the ranks of its node alone, which start as soon as theirs are
 * complete. The exchange of c needs multiprocessors on all ranks. Whoever holds them there is a
 * kernel of an earlier stage, which by induction ends, or of a later one, which would wait for this
 * exchange before it starts.
 */

#include "bootstrap/network/cuda/exchange.h"
#include "bootstrap/network/cuda/mark.h"
#include "handles/cuda/handle.h"
#include "handles/nodes/cuda/route.h"

/** NCCL's stream and the events of an operation. Captured and plain calls have their own: a stream
 * that is under capture takes no other work. */
typedef struct EpCudaSide {
    cudaStream_t wire;
    cudaEvent_t begun;    /**< exact sizes: the operation's place on the caller's stream */
    cudaEvent_t ready[2]; /**< a send buffer is filled; by parity of the chunk */
    cudaEvent_t moved;    /**< the latest chunk has crossed the network */
} EpCudaSide;

/** What a group on several nodes has for the network. */
typedef struct EpCudaRelay {
    EpCudaSide side[2]; /**< of plain calls, of captured ones */
    EpRelayTables tables;
    int32_t *integers; /**< device: of the tables */
    int32_t num_sources;
    int32_t *peers; /**< [num_peers] this rank's relays, by other node [nodes - 1]; then its
                       sources, ascending */
    int32_t num_peers;
    const int32_t *device_peers;
    char *memory;          /**< device: all that follows */
    char *send[2];         /**< by parity of the chunk */
    char *recv;            /**< see ep_relay_received */
    EpStamp *stamp;        /**< this rank's */
    EpStamp *stamps[2];    /**< [num_peers] those that came with the messages, likewise */
    int64_t message_bytes; /**< of a message in these buffers */
    char *routing;         /**< [R] messages of ep_prepare, this rank's in its place */
    int64_t routing_bytes; /**< of one */
    int32_t *counts;       /**< of ep_prepare: see EpRouteArgs */
} EpCudaRelay;

/** Returns the device memory that a group takes for the network; 0 on one node. */
int64_t ep_cuda_relay_bytes(const EpGroupConfig *config, int32_t num_ranks,
                            const EpNodeSizes *nodes);

/** Open and close it. Local. */
EpStatus ep_cuda_relay_open(EpGroup *group);

/** Collective: let NCCL connect the ranks that exchange rows, which it does with the first message:
 *  not in an operation, whose deadline is shorter, or in a capture. */
EpStatus ep_cuda_relay_connect(EpGroup *group);
void ep_cuda_relay_close(EpGroup *group);

/* ---- an operation -------------------------------------------------------------------------- */

/** An operation under way: its kernels on the node, and the exchanges between them. */
typedef struct EpRelayRun {
    EpGroup *group;
    EpCudaRelay *relay;
    EpMarkArgs mark; /**< of the operation, for the watcher */
    EpCudaSide *side;
    EpCudaStream stream; /**< the caller's */
    int32_t chunks;
    const int32_t *message_slots; /**< of each message: see ep_info_chunks; NULL: all */
    int64_t record_bytes;
} EpRelayRun;

/** Which way records go: to the relays, or back. */
typedef enum EpRelayWay { EP_TO_RELAYS, EP_FROM_RELAYS } EpRelayWay;

/** What begins. */
typedef struct EpRelayCall {
    EpStream stream;
    int64_t record_bytes;
    const EpCudaPlan *plan; /**< that is read, the whole of it; NULL: none */
    uint32_t digest;        /**< of the operation and all that ranks must agree on */
    int32_t own_plan;       /**< whether that plan is the handle's own */
} EpRelayCall;

/**
 * Begin an operation on the caller's stream, after the group's earlier ones. With its first
 * exchange ranks of other nodes learn which it is, and this one learns which theirs are. Ranks in
 * different operations may send messages of different sizes, whose end NCCL waits for in vain: then
 * the watchers, which tell each other what they are in, end it (bootstrap/network/cuda/network.h).
 * With exact sizes messages differ between steps of one operation, too: there stamps of a fixed
 * size go first.
 */
EpStatus ep_relay_begin(EpHandle *handle, const EpRelayCall *call, EpRelayRun *run);

/** The same for an operation of the group alone, which reads no plan. */
EpStatus ep_relay_begin_group(EpGroup *group, const EpRelayCall *call, EpRelayRun *run);

/** End it behind such messages: the watcher learns that no more follow. */
EpStatus ep_relay_end_last(EpRelayRun *run);

/** End it: the caller's stream follows all of it, and later operations follow the caller's. */
EpStatus ep_relay_end(EpRelayRun *run);

/** Launch a kernel on the caller's stream. Returns EP_OK, or what CUDA refused. */
EpStatus ep_relay_launch(EpRelayRun *run, int (*launch)(const void *args, int blocks, void *stream),
                         const void *args, int blocks);

/** Surround messages of the caller's, which all ranks exchange at the same places: they follow what
 *  is on the caller's stream so far, and what comes on it then follows them. Stamps go along, and
 *  are compared. If the begin fails, there is no end. */
EpStatus ep_relay_begin_messages(EpRelayRun *run, EpExchange *x);
EpStatus ep_relay_end_messages(EpRelayRun *run, const EpExchange *x);

/** Give all ranks the messages of ep_prepare, each of which lies in its place in `routing`. */
EpStatus ep_relay_gather(EpRelayRun *run);

/** The records of a chunk are in its send buffer, once what is on the caller's stream so far is
 *  done. Chunks take turns with two buffers. That of chunk c is free once chunk c - 2 was exchanged
 *  and read, which the caller enqueues before it fills chunk c. */
EpStatus ep_relay_set_ready(EpRelayRun *run, int32_t chunk);

/** Exchange them, and make the caller's stream wait until the other nodes' records are here.
 * Enqueue first what the GPU can do meanwhile: NCCL's calls take the host long. */
EpStatus ep_relay_exchange(EpRelayRun *run, int32_t chunk, EpRelayWay way);

/** Compare the stamps of a chunk's messages on the caller's stream, where no kernel reads them. */
EpStatus ep_relay_compare(const EpRelayRun *run, int32_t chunk, EpRelayWay way);

/** Returns what kernels that read a chunk's messages need to compare their stamps, and to tell the
 *  watcher that they have come. */
EpMarks ep_relay_marks(const EpRelayRun *run, int32_t chunk, EpRelayWay way);

/** The exchanges alone, on the wire's stream: relay_exchange.c. The watcher learns of the end of
 * what is an operation. */
EpStatus ep_relay_send_stamps(const EpRelayRun *run);
EpStatus ep_relay_open_messages(const EpRelayRun *run, EpExchange *x);
EpStatus ep_relay_close_messages(const EpRelayRun *run, const EpExchange *x);
EpStatus ep_relay_send_routing(const EpRelayRun *run);
EpStatus ep_relay_send_rows(const EpRelayRun *run, int32_t chunk, EpRelayWay way);

/** The same calls as for stamps and routing, outside of any operation: NCCL connects whom they
 *  join. */
ncclResult_t ep_relay_call_once(const EpRelayRun *run);

/** Take a chunk plan for a launch, and the group with its number of tokens. `num_rows`: T of the
 *  token tensors. */
void ep_relay_take_chunk(const EpPlanShape *shape, const EpCudaPlan *whole, EpChunkPlan kind,
                         int32_t chunk, int64_t num_rows, EpCudaPlan *plan, EpCudaGroup *group);

/** Returns the digest of an operation's launch for a chunk plan. It takes the sizes' place, which
 * ranks have compared by their stamps before, or on the way to the rank that they share a node
 * with. */
static inline uint32_t ep_relay_chunk_digest(uint32_t digest, EpChunkPlan kind, int32_t chunk) {
    return digest + ((uint32_t)(2 * chunk + (int32_t)kind) << 16);
}

/** Returns the place of a message in a buffer: of number `i` among the relays or the sources. */
static inline char *ep_relay_message(const EpRelayRun *run, char *buffer, int32_t i) {
    return buffer + i * run->relay->tables.message * run->record_bytes;
}

/** Returns the messages of a chunk that have come: chunks take turns with two buffers. With a limit
 *  all messages of a gather are kept. */
static inline char *ep_relay_received(const EpRelayRun *run, int32_t chunk, EpRelayWay way) {
    const EpCudaRelay *r = run->relay;
    int32_t others = r->tables.nodes - 1;
    if (way == EP_FROM_RELAYS && r->tables.limit)
        return ep_relay_message(run, r->recv, chunk * others);
    return r->recv + chunk % 2 * run->group->nodes.sizes.most * r->message_bytes;
}

#endif
