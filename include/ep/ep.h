/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_H
#define EP_EP_H

/**
 * libep: expert-parallel communication for Mixture-of-Experts models.
 *
 * R ranks form an EP group and share E experts. Each rank holds T tokens. A router names K experts
 * for every token. libep sends each token to the ranks that own its experts and places the rows
 * expert by expert, as grouped GEMMs need them. It then returns the experts' outputs, summed, to
 * the rank that holds the token. It works forward and backward:
 *
 *     ep_prepare             routing indices          -> the step's plan, counts, offsets
 *     ep_dispatch            tokens[T, H]             -> recv_tokens[rows, H]
 *     (your experts)         recv_tokens              -> expert_out[rows, H]
 *     ep_combine             expert_out               -> out[T, H]
 *     ep_combine_backward    grad_out[T, H]           -> grad_expert_out[rows, H]
 *     (your experts)         grad_expert_out          -> grad_recv_tokens[rows, H]
 *     ep_dispatch_backward   grad_recv_tokens         -> grad_tokens[T, H]
 *
 * Contents
 *     1. Version, status, errors          5. Memory that peers reach
 *     2. Tensors                          6. Handles and plans
 *     3. Bootstrap: how ranks meet        7. The five operations
 *     4. Groups                           8. Status of a group, settings
 *
 * Letters in shapes: R ranks, E experts of the group, L experts of this rank, T tokens of this
 * rank, K experts per token, H elements per row, S scales per row, N rows of a source in tensors of
 * the layout RANK_MAJOR.
 *
 * A first program, one rank of a group:
 *
 *     EpGroupConfig config = EP_GROUP_CONFIG_INIT;
 *     config.num_experts = 256, config.max_tokens = 2048, config.max_top_k = 8;
 *     config.max_row_bytes = 7168 * 2;
 *     EpGroup *group;    ep_group_create(&bootstrap, &config, &group);
 *     EpHandle *layer;   ep_handle_create(group, NULL, &layer);
 *
 *     ep_prepare(layer, NULL, &topk_idx, NULL, stream, NULL);
 *     ep_dispatch(layer, NULL, NULL, &tokens, &topk_weights, NULL, stream,
 *                 &recv_tokens, &recv_weights, NULL, NULL);
 *     ... experts ...
 *     ep_combine(layer, NULL, &expert_out, &recv_weights, NULL, stream, &out);
 *
 * Rules that hold everywhere
 *   - Every operation is collective over its group, in the same order on every rank. If ranks
 *     disagree, the library reports EP_ERR_ORDER instead of exchanging wrong data. Handles are
 *     local: ranks create and destroy them in any order, at any time.
 *   - Every call returns an EpStatus; ep_last_error() returns the sentence. A refused call did not
 *     take part and left its outputs unchanged. Correct the argument and call again; the peers
 *     wait. If they give up because of this rank, they quote its refusal.
 *   - The library never exits, aborts, traps or writes to stdout. Every wait has a deadline.
 *   - The same inputs give the same bytes on every run, and on every backend except for the dot
 *     products of ep_combine_backward.
 *   - Calls are asynchronous on the caller's stream. On the host backend a call has finished when
 *     it returns, and the stream is ignored (pass NULL). Operations allocate nothing.
 *   - One thread at a time calls into one group of one rank; ep_group_abort alone may be called by
 *     any thread. Different groups are independent.
 *   - Every struct begins with its size, which EP_..._INIT sets. Structs grow only at the end.
 *     Programs compiled before a struct grew keep working: new fields have their defaults. EpTensor
 *     and EpBootstrap never grow.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Version, status, errors ------------------------------------------------------------ */

#define EP_VERSION_MAJOR 0
#define EP_VERSION_MINOR 2
#define EP_VERSION_PATCH 0

/** The version of the library at run time: major * 10000 + minor * 100 + patch. */
int ep_version(void);

/**
 * Every call that can fail returns a status. A status has a name, a number and a text:
 * X(name, number, text). Numbers never change and are never reused. docs/semantics.md says when
 * each one occurs. The comments below do not repeat these: EP_ERR_NULL for a required pointer that
 * is null, EP_ERR_STRUCT_SIZE for a struct that was not initialized, EP_ERR_DESTROYED for a
 * destroyed group or handle, EP_ERR_FOREIGN for a pointer to anything else.
 */
#define EP_STATUS_MAP(X)                                                                        \
    X(EP_OK, 0, "success")                                                                      \
    X(EP_ERR_NULL, 1, "a required pointer is null")                                             \
    X(EP_ERR_STRUCT_SIZE, 2, "a struct has a size this library does not know")                  \
    X(EP_ERR_RANGE, 3, "a number is negative or out of range")                                  \
    X(EP_ERR_NDIM, 4, "a tensor has the wrong number of dimensions")                            \
    X(EP_ERR_TYPE, 5, "a tensor has the wrong element type")                                    \
    X(EP_ERR_SHAPE, 6, "a tensor has the wrong shape")                                          \
    X(EP_ERR_ROW_BYTES, 7, "a row has an unsupported number of bytes")                          \
    X(EP_ERR_ADDRESS, 8, "an address is not aligned as required, or cannot be reached")         \
    X(EP_ERR_TOKENS, 9, "more tokens than the group's max_tokens")                              \
    X(EP_ERR_TOP_K, 10, "more experts per token than the group's max_top_k")                    \
    X(EP_ERR_ALIGNMENT, 11, "alignment is not a power of two")                                  \
    X(EP_ERR_BUFFER_SIZE, 12, "a buffer is too small")                                          \
    X(EP_ERR_ROUTING, 13, "a routing index names no expert of the group")                       \
    X(EP_ERR_OVERFLOW, 14, "more rows arrived than the receive capacity holds")                 \
    X(EP_ERR_NOT_PREPARED, 15, "there is no plan: ep_prepare comes first")                      \
    X(EP_ERR_DESTROYED, 16, "the object was destroyed")                                         \
    X(EP_ERR_HANDLE_MEMORY, 17, "the plan's memory was overwritten")                            \
    X(EP_ERR_FOREIGN, 18, "the memory or plan belongs to another group or configuration")       \
    X(EP_ERR_MISMATCH, 19, "ranks were configured differently")                                 \
    X(EP_ERR_ORDER, 20, "ranks called operations in a different order or with different sizes") \
    X(EP_ERR_TIMEOUT, 21, "a rank did not arrive before the deadline")                          \
    X(EP_ERR_PEER, 22, "another rank of the group failed")                                      \
    X(EP_ERR_NO_MEMORY, 23, "out of memory")                                                    \
    X(EP_ERR_SETTING, 24, "a LIBEP_ environment setting is unknown or malformed")               \
    X(EP_ERR_UNSUPPORTED, 25, "not supported by this build, machine or backend")                \
    X(EP_ERR_BOOTSTRAP, 26, "the bootstrap reported a failure")                                 \
    X(EP_ERR_SYSTEM, 27, "a call to the operating system failed")                               \
    X(EP_ERR_ABORTED, 28, "the group was aborted")                                              \
    X(EP_ERR_MASKED, 29, "a rank was late, and this rank goes on without it")

/** What a call returned. */
typedef enum EpStatus {
#define EP_STATUS_ENUM(name, number, text) name = number,
    EP_STATUS_MAP(EP_STATUS_ENUM)
#undef EP_STATUS_ENUM
} EpStatus;

/** Name and text of a status, as in "EP_ERR_TYPE: a tensor has ...". Never NULL; static storage. */
const char *ep_status_string(EpStatus status);

/**
 * The sentence of the calling thread's last failed call: rank, call, argument, expected and got.
 * "" if no call failed. The library owns the string, one per thread. It is valid until this
 * thread's next failing call.
 */
const char *ep_last_error(void);

/**
 * Set the sentence that ep_last_error() returns on this thread (the library copies it), and return
 * `status`. A sentence is one line: "\n" replaces a newline, "\x1b" an escape, in any sentence.
 * For bootstrap callbacks: `return ep_set_last_error(EP_ERR_..., "rank 3 is gone");`.
 */
EpStatus ep_set_last_error(EpStatus status, const char *sentence);

/* ---- 2. Tensors ---------------------------------------------------------------------------- */

/** Element types. Combine sums BF16, FP16 and FP32. Dispatch moves rows of any type as bytes. */
typedef enum EpType {
    EP_TYPE_BF16 = 1,
    EP_TYPE_FP16 = 2,
    EP_TYPE_FP32 = 3,
    EP_TYPE_FP8_E4M3 = 4,
    EP_TYPE_FP8_E5M2 = 5,
    EP_TYPE_UINT8 = 6, /**< plain bytes: packed fp4, E8M0 scales, anything else */
    EP_TYPE_INT32 = 7,
    EP_TYPE_INT64 = 8
} EpType;

#define EP_MAX_DIMS 3

/**
 * A tensor is a pointer, a type and a shape: row-major, contiguous, memory owned by the caller.
 *
 * Alignment: row tensors (tokens, expert outputs, their gradients) start on 16 bytes and their rows
 * are multiples of 16 bytes. Scales start on 4 bytes. Other tensors start on a multiple of their
 * element size. `data` may be anything if the shape contains a 0.
 *
 * Size: fewer than 2^62 bytes, where a size of 0 counts as 1; else EP_ERR_RANGE.
 *
 * Overlap: memory that a call writes must not overlap anything else that the call is given. The
 * library does not check this. A call may be given the same memory more than once if it only reads
 * it.
 *
 * Memory: on the host backend `data` is memory that CPUs reach. On the CUDA backend it is memory of
 * the group's device, managed memory or pinned host memory, or plain memory if the GPU can read it
 * directly. Other memory is refused with EP_ERR_ADDRESS, for the tensors that the setting
 * LIBEP_CHECK selects. (A build without the CUDA backend cannot tell a GPU's memory.)
 *
 * EpTensor never grows, since programs may have arrays of it, whose stride is its size.
 */
typedef struct EpTensor {
    size_t struct_size;
    void *data;
    EpType type;
    int32_t ndim;               /**< number of dimensions, 1 .. EP_MAX_DIMS */
    int64_t shape[EP_MAX_DIMS]; /**< elements per dimension, each >= 0; the last is contiguous */
} EpTensor;

/* Constructors. `data` is const here because many tensors are inputs; libep writes only outputs. */

static inline EpTensor ep_tensor_3d(const void *data, EpType type, int64_t d0, int64_t d1,
                                    int64_t d2) {
    EpTensor t;
    t.struct_size = sizeof(t);
    t.data = (void *)(uintptr_t)data;
    t.type = type;
    t.ndim = 3;
    t.shape[0] = d0;
    t.shape[1] = d1;
    t.shape[2] = d2;
    return t;
}

static inline EpTensor ep_tensor_2d(const void *data, EpType type, int64_t d0, int64_t d1) {
    EpTensor t = ep_tensor_3d(data, type, d0, d1, 1);
    t.ndim = 2;
    return t;
}

static inline EpTensor ep_tensor_1d(const void *data, EpType type, int64_t d0) {
    EpTensor t = ep_tensor_3d(data, type, d0, 1, 1);
    t.ndim = 1;
    return t;
}

/** Bytes of one element, or 0 for a value that is not an EpType. */
size_t ep_type_bytes(EpType type);

/** A cudaStream_t, or NULL. The host backend ignores it. */
typedef void *EpStream;

/* ---- 3. Bootstrap: how ranks meet ---------------------------------------------------------- */

/**
 * A bootstrap gives libep what it needs to set up a group: this rank's number, the number of ranks,
 * an allgather of a few bytes, and a barrier. ep_bootstrap_mpi (ep_mpi.h) makes one from a
 * communicator, ep_bootstrap_nccl (ep_nccl.h) from an NCCL communicator. ep_bootstrap_local makes R
 * of them for R threads of one process. A framework that already knows its ranks fills in the
 * struct itself: rank, size, allgather and barrier are enough. Ranks of the host backend on several
 * nodes then send each other messages over TCP (LIBEP_INTERFACE), all of them or none.
 *
 * Callbacks return EP_OK or an error (ep_set_last_error sets the sentence; without one libep names
 * the callback and the status). A number that is no EpStatus is EP_ERR_BOOTSTRAP. A rank whose
 * callback has failed takes no further part, and its peers wait up to their deadline. libep calls
 * them when groups are created and destroyed. It also calls allgather when memory that peers reach
 * (section 5) is made and released. Only isend, irecv and test are called during operations.
 * ep_group_create copies the struct; what `context` points to must outlive the groups made from it.
 * Timeouts are in seconds. A callback that waits calls ep_poll_abort now and then, so that
 * ep_group_abort can end its wait; without that it waits up to its timeout.
 *
 * EpBootstrap never grows, since ep_bootstrap_local fills an array of it.
 */
typedef struct EpBootstrap {
    size_t struct_size;
    int32_t rank;  /**< 0 .. size - 1 */
    int32_t size;  /**< number of ranks */
    void *context; /**< passed to every callback */

    /** Gather `bytes` bytes from every rank into out[size * bytes], in rank order. */
    EpStatus (*allgather)(void *context, const void *in, void *out, size_t bytes,
                          double timeout_seconds);
    /** Return after every rank has called it. */
    EpStatus (*barrier)(void *context, double timeout_seconds);

    /**
     * Optional, both or neither (NULL: libep uses POSIX shared memory). share is collective over
     * all ranks. It allocates `bytes` zeroed bytes for each rank, 64-byte aligned, that all ranks
     * of the same `node` can load and store. It sets segments[r] to rank r's segment as mapped
     * here, or to NULL if r is on another node, and *memory to what share_free takes. `together` is
     * 1 if all ranks are known to call share_free now. It is 0 if some may be gone; then share_free
     * must not wait for them.
     */
    EpStatus (*share)(void *context, int32_t node, size_t bytes, double timeout_seconds,
                      void **segments, void **memory);
    void (*share_free)(void *context, void *memory, int together);

    /**
     * Optional, all four or none, equal on all ranks (NULL: libep connects ranks on different nodes
     * by TCP when a group on the host backend is created). Nonblocking point-to-point messages, in
     * order for each (pair of ranks, tag). test sets *done, and releases the request once it is
     * done. cancel releases it without waiting. ep_poll_abort may call irecv and test: a callback
     * that calls it holds no lock then which these two take.
     */
    EpStatus (*isend)(void *context, int32_t peer, int32_t tag, const void *data, size_t bytes,
                      void **request);
    EpStatus (*irecv)(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                      void **request);
    EpStatus (*test)(void *context, void **request, int *done);
    void (*cancel)(void *context, void **request);

    /** Optional: free `context`. ep_bootstrap_destroy calls it. */
    void (*destroy)(void *context);
} EpBootstrap;

#define EP_BOOTSTRAP_INIT \
    { sizeof(EpBootstrap), 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/**
 * For callbacks of a bootstrap that wait. Returns EP_OK while the wait may go on. Returns
 * EP_ERR_ABORTED or EP_ERR_PEER, with the sentence, once this rank or another one has aborted the
 * group for which the calling thread waits; the callback then gives up and returns that status. Is
 * cheap, and returns EP_OK outside of callbacks.
 */
EpStatus ep_poll_abort(void);

/**
 * Make bootstraps for `size` ranks (1 .. EP_MAX_RANKS) that are threads of this process: out[size].
 * out[r] belongs to the thread that is rank r. out[0] must be initialized, and stands for all:
 * EpBootstrap all[8] = {EP_BOOTSTRAP_INIT}. They are written only on success. Destroy each once.
 * EP_ERR_RANGE, EP_ERR_STRUCT_SIZE, EP_ERR_NO_MEMORY.
 */
EpStatus ep_bootstrap_local(int32_t size, EpBootstrap *out);

/** Free what a bootstrap owns. Destroy its groups first. NULL is allowed. */
void ep_bootstrap_destroy(EpBootstrap *bootstrap);

/* ---- 4. Groups ----------------------------------------------------------------------------- */

/**
 * A group is a set of ranks that share E experts. It owns the communication resources of its ranks:
 * the choice of the backend, the GPU of each rank, staging memory, and the deadline of every wait.
 * One group serves all layers that have the same experts. Opaque; a process may have several.
 */
typedef struct EpGroup EpGroup;

/**
 * The backend moves the bytes. HOST takes tensors in plain memory, CUDA tensors in memory that the
 * rank's GPU reaches. A program that asks for AUTO calls ep_group_query before it allocates
 * tensors, to learn which backend it got. A program whose memory is of one kind names its backend.
 *
 * AUTO is CUDA if every rank has a usable GPU, and HOST otherwise. Each rank needs its own GPU,
 * unless the setting LIBEP_SHARE_GPUS lets ranks share. All ranks make the same choice.
 * EpGroupInfo.reason (and ep_info) gives the reason.
 */
typedef enum EpBackend {
    EP_BACKEND_AUTO = 1, /**< setting LIBEP_BACKEND, else the best that every rank can use */
    EP_BACKEND_HOST = 2, /**< CPUs: shared memory within a node, messages between nodes */
    EP_BACKEND_CUDA = 3  /**< GPUs that reach each other's memory */
} EpBackend;

/** What happens to slots past the receive capacity. In both cases the slots at or past it, in slot
 *  order, are not written, the plan counts them, and every other slot is right. */
typedef enum EpOverflow {
    EP_OVERFLOW_ERROR = 1, /**< ep_group_status also reports EP_ERR_OVERFLOW */
    EP_OVERFLOW_DROP = 2   /**< counted, no error: the model accepts lost rows */
} EpOverflow;

/**
 * The mode of a handle. Both modes have the same calls, layouts, bytes and statuses.
 *
 * THROUGHPUT, for any number of tokens: ep_prepare makes the plan, the other four operations use
 * it. Supports exact sizing and backward.
 *
 * LATENCY, for the few tokens of a decoding step: ep_prepare records the addresses of the routing,
 * and ep_dispatch does everything in one launch. ep_dispatch and ep_combine can be split into a
 * send and a receive phase, with computation in between. Sizes are static (a capacity, BATCHED or
 * RANK_MAJOR), and there is no backward. Rows on their way lie in buffers of the group: see
 * latency_sets.
 *
 * AUTO: LATENCY if max_tokens is at most EP_LATENCY_TOKENS, sizes are static, the group is on one
 * node and has sets of buffers (latency_sets), otherwise THROUGHPUT. A program that asks for AUTO
 * uses only what both modes support.
 *
 * On several nodes AUTO is LATENCY if max_tokens is at most LIBEP_NODE_LATENCY, too, and all nodes
 * have as many ranks. GPUs have latency mode on such nodes alone.
 */
typedef enum EpMode { EP_MODE_AUTO = 1, EP_MODE_THROUGHPUT = 2, EP_MODE_LATENCY = 3 } EpMode;

/** The largest max_tokens for which AUTO means LATENCY, on one node. */
#define EP_LATENCY_TOKENS 256

/** "Use the default", in fields that allow it. */
#define EP_DEFAULT (-1)

/** An expert that a token names more than once. */
typedef enum EpDuplicates {
    EP_DUPLICATES_KEEP = 1, /**< each entry gets a slot */
    EP_DUPLICATES_MERGE = 2 /**< one slot: the entry with the lowest k keeps it, the others count as
                                 "no expert", and their weights are not used */
} EpDuplicates;

/** Which copy of an expert a token takes: see ep_group_place. */
typedef enum EpCopyChoice {
    EP_CHOICE_NEAR = 1,  /**< among the copies on the token's rank; if there are none, among those
                              on its node; else among all */
    EP_CHOICE_SPREAD = 2 /**< among all copies */
} EpCopyChoice;

/** How the sums of ep_combine and ep_dispatch_backward are made: see ep_combine. */
typedef enum EpSums {
    EP_SUMS_BY_RANK = 1, /**< each rank adds up its slots of a token, and one sum travels */
    EP_SUMS_BY_ENTRY = 2 /**< every entry's row travels, and the token's rank adds them all: the
                              bits depend on no division into ranks or nodes, for K rows per token
                              on the way back. EXPERT_MAJOR and BATCHED only, without sum_quant */
} EpSums;

/** What an operation of latency mode does where a rank is late, in a group with masks. */
typedef enum EpLate {
    EP_LATE_FAIL = 1, /**< waits until the deadline, which suspends the group */
    EP_LATE_MASK = 2  /**< cuts the rank after late_us, and completes: see ep_group_mask */
} EpLate;

/**
 * Configuration of a group. Fields marked = must have the same value on every rank. ep_group_create
 * compares them; EP_ERR_MISMATCH names the field, the ranks and both values.
 */
typedef struct EpGroupConfig {
    size_t struct_size;
    int32_t num_experts;     /**< = E, 1 .. EP_MAX_EXPERTS, the experts that topk_idx names. Rank r
                                  owns a contiguous block: see ep_expert_range. A GPU's shared
                                  memory limits the CUDA backend to about 5,400 experts; with more,
                                  AUTO takes HOST. With num_physical all this holds of P */
    int32_t max_tokens;      /**< = most tokens of a rank in one step, >= 1 */
    int32_t max_top_k;       /**< = most experts per token, 1 .. EP_MAX_TOP_K */
    int64_t max_row_bytes;   /**< = bytes of the largest row of any call, gradients included;
                                  multiple of 16, at most EP_MAX_ROW_BYTES */
    int64_t max_scale_bytes; /**< = bytes of the largest row of scales, 0 for none; multiple of 4,
                                at most EP_MAX_ROW_BYTES */
    int32_t alignment;       /**< = slabs are padded to multiples of this many rows, a power of 2 */
    int64_t max_recv_rows;   /**< = receive capacity in rows, or 0 for exact sizing: after
                                  ep_prepare read the total, then allocate (see ep_handle_info) */
    EpOverflow overflow;     /**< = policy for slots past the capacity */
    EpBackend backend;       /**< = AUTO, HOST or CUDA */
    double timeout_seconds;  /**< deadline of every wait, > 0; EP_DEFAULT: setting LIBEP_TIMEOUT */
    void *nccl_comm;         /**< a borrowed ncclComm_t (ep_nccl.h), or NULL; all ranks give one or
                                  none does */
    int32_t device;          /**< this rank's CUDA device, or EP_DEFAULT: see below */
    EpMode mode;             /**< = mode of handles that do not choose their own */
    int32_t num_sms;         /**< multiprocessors that operations may use on the CUDA backend, >= 2;
                                  EP_DEFAULT: setting LIBEP_NUM_SMS. May differ between ranks */
    EpDuplicates duplicates; /**< = slots of an expert that a token names twice */
    int32_t latency_sets;    /**< = sets of buffers for latency mode, 0 .. EP_MAX_LATENCY_SETS: as
                                  many operations may be between their phases. 0: no handle can be
                                  in latency mode. EP_DEFAULT: 4 if `mode` lets handles be in
                                  latency mode, else 0 */
    int32_t num_nodes;       /**< = nodes (EpGroupInfo.num_nodes) that the ranks are on; a group of
                                  other nodes is refused. 0: any. ep_group_memory counts with as
                                  many, of equal size; 0: with those of LIBEP_TOPOLOGY, or one */
    EpSums sums;             /**< = how the sums of a token's rows are made. BY_ENTRY takes more
                                  memory that peers reach: ep_group_memory counts it */
    int32_t node_rows;       /**< = room in a rank's message to another node, in tokens, at most
                                  max_tokens; 0: max_tokens. See below */
    int32_t num_physical;    /**< = P, the places that hold copies of experts, 1 .. EP_MAX_EXPERTS;
                                  EP_DEFAULT: the group has no placement: see ep_group_place */
    EpCopyChoice choice;     /**< = which copy of an expert a token takes, with num_physical */
    int32_t masks;           /**< = 1: ranks may be masked (ep_group_mask), and a missing rank only
                                  suspends the group; 0: they may not. CUDA on one node alone */
    EpLate on_late;          /**< = MASK needs `masks` */
    int32_t late_us;         /**< = microseconds that an operation of latency mode waits for a rank,
                                  at most until the deadline; >= 1 with EP_LATE_MASK, else unused */
    int32_t max_ranks;       /**< = places for ranks, present or not, up to EP_MAX_RANKS, on GPUs
                                  72: processes may join later (ep_group_join). Needs `masks`. AUTO
                                  is HOST then. EP_DEFAULT: the bootstrap's ranks, nobody joins */
    int32_t place;           /**< with max_ranks: this rank's place, below max_ranks, and its number
                                  in the group. EP_DEFAULT: its rank in the bootstrap. Places
                                  ascend with the ranks of the bootstrap */
} EpGroupConfig;

/*
 * node_rows, for groups on several nodes. With static sizes a message between nodes has a fixed
 * number of places, each with room for a token's row, scales and routing. By default there is one
 * for each of max_tokens. With fewer places messages and buffers shrink, since not every token
 * needs every node: `ep_info --plan` proposes a number. Tokens take places in ascending order. A
 * token that finds none has no slot on that node. Slot numbers skip its entries there, whose
 * weights have gradient 0. The ranks that own their experts count them in dropped_slots, before
 * any slot that their own capacity drops, and EP_OVERFLOW_ERROR reports them there. needed_rows
 * does not have them.
 *
 * Both backends drop the same slots. Handles on several nodes then need static sizes: a capacity,
 * or BATCHED or RANK_MAJOR. On one node node_rows has no effect.
 */

#define EP_MAX_LATENCY_SETS 16

#define EP_MAX_EXPERTS 16777216 /* with it every count fits 32 bits, and every size 64 */
#define EP_MAX_TOP_K 32
#define EP_MAX_ROW_BYTES 65536
#define EP_MAX_RANKS 1024

/*
 * The GPU of a rank. libep takes config.device if it is given, and otherwise the device of a
 * borrowed communicator. EP_DEFAULT is the calling thread's current device (cudaSetDevice). libep
 * assigns devices itself only if nobody has set one: if several ranks see the same GPU as device 0
 * and device 0 is current on all of them, the first of them gets device 0, the next one device 1,
 * and so on, as long as there are devices. Two ranks on the same GPU cannot use the CUDA backend,
 * unless the setting LIBEP_SHARE_GPUS is yes on all ranks and each rank is a separate process (for
 * debugging). Then the assignment wraps around. With max_ranks each process chooses by itself: if
 * device 0 is current, its rank gets device `place` modulo the GPUs that the process sees.
 *
 * Every call runs on the group's device, whatever device is current on the thread, and restores the
 * current device afterwards, unless that device was never used (selecting it would create a context
 * there). If libep assigned the device, ep_group_create leaves it current on the calling thread, so
 * that later allocations are on the right GPU. The host backend ignores all of this.
 */

/** The caller sets num_experts, max_tokens, max_top_k and max_row_bytes. */
#define EP_GROUP_CONFIG_INIT                                                                  \
    {                                                                                         \
        sizeof(EpGroupConfig), 0, 0, 0, 0, 0, 1, 0, EP_OVERFLOW_ERROR, EP_BACKEND_AUTO,       \
            EP_DEFAULT, NULL, EP_DEFAULT, EP_MODE_THROUGHPUT, EP_DEFAULT, EP_DUPLICATES_KEEP, \
            EP_DEFAULT, 0, EP_SUMS_BY_RANK, 0, EP_DEFAULT, EP_CHOICE_NEAR, 0, EP_LATE_FAIL, 0, \
            EP_DEFAULT, EP_DEFAULT                                                             \
    }

/**
 * Create a group; collective over the bootstrap. *out is written only on success; the caller
 * destroys it with ep_group_destroy. A failure on any rank (bad or differing configuration, no
 * memory) is an error on every rank: EP_ERR_PEER if only another rank was refused.
 */
EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpGroup **out);

/** Destroy a group and its handles. Each rank waits, up to the deadline, until its peers have
 *  finished their last call; in this sense it is collective. If this rank's last call was refused,
 *  peers that wait for it in that call get EP_ERR_PEER at once, with its sentence. Where ranks
 * share a process it also waits until all of them have freed their memory. A group that has failed
 * or was aborted is destroyed without waiting, so its ranks are out of step on the bootstrap: the
 * next group needs a new one. NULL is allowed. */
void ep_group_destroy(EpGroup *group);

/**
 * Abort a group: end all waits of this rank, now and later. Any thread may call it while the group
 * lives, also while another thread is in a call on the group or in ep_group_destroy: a watchdog, or
 * a thread that handles Ctrl-C. It takes a lock, so do not call it in a signal handler itself. It
 * does not wait for anything.
 *
 * From then on the group has failed on this rank: a call that waits ends. Operations,
 * ep_handle_info, ep_group_status and calls about memory that peers reach are refused with
 * EP_ERR_ABORTED and `sentence`. Destroy the group. Operations that are enqueued on streams
 * and need not wait still complete. Other ranks that wait for this one, or for any rank in a wait
 * that has become long, get EP_ERR_PEER, soon and not at their deadline: "rank 1: dispatch: rank 0
 * has given up on the group: <sentence>". docs/semantics.md says how they learn of it.
 *
 * A waiting callback of the caller's bootstrap ends by itself, or at its timeout: see
 * ep_poll_abort. A group that is still being created cannot be aborted.
 *
 * sentence  why: UTF-8, copied. What exceeds 255 bytes is cut off.
 *
 * The first abort counts. If the group has been aborted or has failed before, returns EP_OK and
 * changes nothing.
 */
EpStatus ep_group_abort(EpGroup *group, const char *sentence);

/**
 * Masks: a group with config.masks goes on without ranks that have failed.
 *
 * A *masked* rank takes no part. Its experts are "no expert": tokens that name them get no slot
 * there, weights are not renormalised, and their gradients are 0. It sends and receives nothing,
 * and nobody waits for it.
 *
 * In such a group a missing rank does not end the group. A wait that ends at the deadline, or finds
 * that its rank has gone, leaves the group *suspended*: outputs of that operation are undefined, it
 * returns EP_ERR_TIMEOUT, and so does every further operation until ep_group_mask. EpFinding.peer
 * of ep_group_status names the rank. Other failures end the group, as elsewhere. ep_mem_alloc,
 * ep_window_register and ep_window_adopt are EP_ERR_UNSUPPORTED.
 *
 * ep_group_mask makes `alive` the ranks that take part, from the next operation on. Every rank
 * whose bit is set calls it, at the same place in the order of operations: living ones, and masked
 * ones that shall be readmitted. The others are not asked. It waits for them, equalises what ranks
 * count, and drops what is under way. It also ends a suspension. Pending send phases stay pending;
 * on CUDA only where all ranks in `alive` have sent the same ones, else they are dropped. There it
 * first waits for this rank's kernels, on all streams. Captured graphs stay valid.
 *
 * Plans made before stay valid, if all ranks in `alive` have them. Their entries on masked ranks
 * count as "no expert". Receive rows of masked ranks are zero rows, with weight 0 and ids -1.
 *
 * Late ranks. With on_late = EP_LATE_MASK an operation of latency mode waits late_us for a rank, or
 * until the rank is found to have gone, and then *cuts* it. It completes without that rank, which
 * counts as masked for this rank alone from then on. If the rank's routing had not come, its counts
 * are 0. If it had, its slots stay and are counted, as zero rows with weight 0 and ids -1. Nothing
 * of them returns. Each rank cuts by itself: the late one finds that it was cut, and cuts the
 * other, too. ep_group_status reports cut ranks once, as EP_ERR_MASKED; the group goes on.
 * Operations of throughput mode are refused with EP_ERR_TIMEOUT while a rank is cut. The next
 * ep_group_mask makes the views of all ranks equal and ends all cuts.
 *
 * group   a live group, which may be suspended
 * alive   [ceil(R / 32)] words: bit r % 32 of word r / 32 is rank r's. This rank's is set
 * stream  the call waits for work before it; not under capture. Ignored on the host backend
 *
 * EP_ERR_UNSUPPORTED: the group has no masks, or `stream` is under capture. EP_ERR_RANGE: this
 * rank's bit is not set, or one past the ranks, or of an empty place (ep_group_admit), is.
 * EP_ERR_ORDER: a rank has called it with another set; the sentence names a rank that differs.
 * EP_ERR_TIMEOUT: a rank did not call it within the deadline. After these two the ranks that take
 * part are the same as before, and the group is suspended: call it again. EpFinding names the rank.
 * After EP_ERR_ORDER its `expected` is a rank that is in this rank's set alone, or its `seen` one
 * that is in the other's alone; else they are -1. A rank that dies in the call may make it succeed
 * on some ranks alone: they miss the others in the next operation, and their call again makes all
 * alike.
 */
EpStatus ep_group_mask(EpGroup *group, const uint32_t *alive, EpStream stream);

/** Read the ranks that take part, as ep_group_mask takes them: [ceil(R / 32)] words. Ranks that
 *  this rank has cut do not. Local. Without config.masks all do. */
EpStatus ep_group_alive(EpGroup *group, uint32_t *alive);

/**
 * Cut a rank by hand, as an operation of latency mode cuts one that is late: this rank goes on
 * without it until ep_group_mask. Local; no call on the group is under way. A rank that is masked
 * or cut stays so. On CUDA it takes effect on `stream`, and pending operations do without the rank.
 *
 * EP_ERR_UNSUPPORTED: the group does not have EP_LATE_MASK, or `stream` is under capture.
 * EP_ERR_RANGE: no other rank's number.
 */
EpStatus ep_group_cut(EpGroup *group, int32_t rank, EpStream stream);

/**
 * Joining: processes take places of a group that exists. A group with config.max_ranks has that
 * many places. R is max_ranks then, and a rank is a place: experts are divided among all places
 * (ep_expert_range). A place without a process is *empty*. It counts as a masked rank and cannot be
 * in ep_group_mask's `alive`. If places are empty when the group is created, the group needs
 * num_physical (ep_group_place), since experts of empty places are "no expert".
 *
 * Living ranks call ep_group_admit, newcomers ep_group_join, over one bootstrap of them all in
 * ascending order of their places. It has nothing to do with the bootstrap of ep_group_create, and
 * may be destroyed afterwards. Newcomers give the group's configuration and their own `place`: an
 * empty one, or one whose rank the living have masked. So a process that was killed comes back: the
 * living mask it, a new process joins in its place.
 *
 * Newcomers allocate before they meet the living. They are masked until ep_group_mask, which all
 * call then, and have the placement of the last ep_group_place. Plans are not theirs: operations
 * that read a plan from before need one that all ranks in `alive` have.
 *
 * All ranks that shall go on take part, masked ones, too. A process that is left out no longer
 * belongs to the group: its place is empty, and it may join again. The call is no operation, and
 * may come while the group is suspended; no other call on the group is under way.
 *
 * On failure the group is as it was, and goes on; newcomers have no group. A rank that loses
 * another one in the last moment may have failed alone. Then its ep_group_mask with the newcomers
 * is refused: admit others in their places, or mask without them.
 *
 * On a node, ranks of such a group reach each other's memory through /proc, so they share a PID
 * namespace. Nodes exchange messages over TCP. On GPUs all ranks are on one machine and in one NVLink
 * domain, each with a GPU as those of the others are, and give each other memory over Unix sockets:
 * they share a network namespace. Addresses that kernels and captured graphs of the living hold stay
 * valid. There ep_group_admit waits for this rank's operations, and no stream may be under capture.
 * The group never uses the bootstrap outside of the three calls, and destroying it waits for nobody.
 *
 * bootstrap  of the living and the newcomers; isend and share are not used
 * config     as in ep_group_create, with max_ranks
 *
 * EP_ERR_MISMATCH: configurations or versions of the library differ. EP_ERR_PEER: another rank was
 * refused. EP_ERR_TIMEOUT: a rank did not come within the deadline, or died meanwhile.
 * EP_ERR_ORDER: places do not ascend; a newcomer's place, or one that the living do not mask, is
 * taken; a rank that is alive is missing; or nobody admits. EP_ERR_UNSUPPORTED: no max_ranks, or a
 * GPU that cannot serve the group, of another node, of another kind, or another rank's.
 */
EpStatus ep_group_admit(EpGroup *group, const EpBootstrap *bootstrap);

/** Join a group: see ep_group_admit. *out is written only on success. */
EpStatus ep_group_join(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpGroup **out);

/** The memory that a configuration takes, and whether it is feasible. */
typedef struct EpGroupMemory {
    size_t struct_size;
    int32_t feasible;      /**< 1, or 0: `reason` says why not */
    EpBackend backend;     /**< the backend that would be chosen (HOST or CUDA) */
    int64_t shared_bytes;  /**< per rank: memory that peers reach (staging, flags, latency mode's
                                buffers) */
    int64_t private_bytes; /**< per rank: all other memory, without plans */
    int64_t handle_bytes;  /**< a plan of default EpHandleConfig, on the rank with most experts; 0
                                if no default handle exists (latency mode with exact sizing) */
    char reason[256];      /**< why it is not feasible, or why this backend was chosen */
} EpGroupMemory;

#define EP_GROUP_MEMORY_INIT \
    { sizeof(EpGroupMemory), 0, EP_BACKEND_AUTO, 0, 0, 0, "" }

/**
 * Compute the memory of a group of `num_ranks` ranks. Local; creates and allocates nothing. An
 * infeasible configuration returns EP_OK with feasible = 0 and a reason: a backend that cannot be
 * had here, more nodes than ranks, or sizes for which no handle of default EpHandleConfig can be
 * created. An invalid one returns what ep_group_create would. Whether a machine has the memory, and
 * what takes several ranks to know (whether each has a GPU of its own, all of one kind), is found
 * only by ep_group_create.
 */
EpStatus ep_group_memory(const EpGroupConfig *config, int32_t num_ranks, EpGroupMemory *out);

/** Facts about a live group. */
typedef struct EpGroupInfo {
    size_t struct_size;
    int32_t rank, size;        /**< with max_ranks: its place, and the places */
    int32_t num_experts;       /**< E */
    int32_t first_expert;      /**< this rank owns first_expert .. + num_local_experts - 1 */
    int32_t num_local_experts; /**< L */
    EpBackend backend;         /**< HOST or CUDA */
    int32_t node, num_nodes;   /**< this rank's node, and how many nodes the group spans: machines,
                                    or what LIBEP_TOPOLOGY makes of them. Sums depend on them */
    int32_t numa_node;         /**< NUMA node of this rank's CPUs, -1 if it spans several */
    int32_t num_cpus;          /**< CPUs this rank may run on */
    int64_t library_bytes;     /**< memory that libep holds for this rank: the group and the plans
                                    of its handles; memory of section 5 is the caller's */
    int32_t device;            /**< CUDA device of this rank, -1 on the host backend */
    int32_t bound;             /**< 1 if LIBEP_BIND has bound this rank to the CPUs near its GPU */
    char gpu[64];              /**< "NVIDIA H200, 0000:17:00.0"; "" on the host backend */
    char reason[256];          /**< why this backend was chosen */
    EpMode mode;               /**< THROUGHPUT or LATENCY, for handles of default EpHandleConfig */
    int32_t reserved;          /**< 0 */
    char within[48];           /**< how ranks of a node reach each other: "NVLink" */
    char between[48];          /**< how nodes do: "NCCL 2.28.9"; "" on one node */
    int32_t num_physical;      /**< P; without a placement E */
    EpCopyChoice choice;
    char tuning[128];          /**< whose constants divide this rank's blocks: built in, a guess, or
                                    the file of LIBEP_TUNING; "" on the host backend */
} EpGroupInfo;

#define EP_GROUP_INFO_INIT                                                                 \
    {                                                                                      \
        sizeof(EpGroupInfo), 0, 0, 0, 0, 0, EP_BACKEND_AUTO, 0, 0, 0, 0, 0, -1, 0, "", "", \
            EP_MODE_AUTO, 0, "", "", 0, EP_CHOICE_NEAR, ""                                 \
    }

/** Read the facts about a group. Local. */
EpStatus ep_group_query(const EpGroup *group, EpGroupInfo *out);

#define EP_TUNING_BYTES 16384

/**
 * Write the constants by which this rank's kernels divide their blocks, as LIBEP_TUNING reads them,
 * with a comment on each and a final 0. They are this rank's own and change no result. Local.
 *
 * text          [bytes]: EP_TUNING_BYTES suffice
 *
 * EP_ERR_UNSUPPORTED: the host backend, which has none. EP_ERR_BUFFER_SIZE: too few bytes.
 */
EpStatus ep_group_tuning(const EpGroup *group, char *text, size_t bytes);

/**
 * On several nodes of GPUs: the rank of a node to which this rank sends what that node needs, and
 * from which it gets that node's sums; this rank itself for its own node. Local.
 *
 * EP_ERR_RANGE: no such node. EP_ERR_UNSUPPORTED: the host backend, whose ranks send to each other
 * directly.
 */
EpStatus ep_group_relay(const EpGroup *group, int32_t node, int32_t *rank);

/**
 * Placement: rank `rank` of `num_ranks` owns experts *first .. *first + *count - 1. Each rank owns
 * a contiguous block of num_experts / num_ranks experts, in rank order; the first
 * num_experts % num_ranks ranks own one more. In a group with num_physical, P takes the place of
 * num_experts. EP_ERR_RANGE.
 */
EpStatus ep_expert_range(int32_t num_experts, int32_t num_ranks, int32_t rank, int32_t *first,
                         int32_t *count);

/**
 * Place the experts of a group with num_physical anew. Collective and in the order of the group's
 * operations. Operations called after it use the map, and so do replays of graphs that lie behind
 * it in the order of streams. A plan keeps the placement that it was prepared with, and so does a
 * pending operation.
 *
 * Physical experts 0 .. P - 1 are places for weights: rank r owns a block of them (ep_expert_range
 * with P). All that speaks of a rank's own experts speaks of its physical ones: L, first_expert,
 * counts, slabs, capacities and global ids. topk_idx names logical experts 0 .. E - 1. So does
 * EP_DUPLICATES_MERGE.
 *
 * map     [P] INT32 in memory that the backend reaches: the logical expert that each place holds,
 *         or -1 for none. A logical expert may have any number of copies, also on one rank, or
 *         none. The operation reads it; all ranks give the same values.
 * stream  as in ep_prepare; it can be captured
 *
 * Copies of a logical expert are its n places, ascending. Token t of rank s takes copy (s + t) % n
 * of those that EpGroupConfig.choice leaves. An entry whose expert has no copy counts as "no
 * expert". A new group has the map p -> p for p < E, and -1 from there on.
 *
 * Ranks must hold the weights of the new map once operations use it: ep_weight_move (ep_weight.h)
 * moves them. Their gradients belong to each copy alone; a training loop adds those of an expert's
 * copies itself. In latency mode the dispatch routes, whenever its ep_prepare was called.
 *
 * Errors
 *   EP_ERR_UNSUPPORTED  the group has no num_physical
 *   EP_ERR_ORDER        maps differ between ranks, or a rank calls another operation; it ends the
 *                       group. The host backend returns it, else see ep_group_status
 *   EP_ERR_ROUTING      through ep_group_status: entries below -1 or >= E. They count as -1;
 *                       `token` is the first of them
 */
EpStatus ep_group_place(EpGroup *group, const EpTensor *map, EpStream stream);

/**
 * Make a map for ep_group_place from the experts' loads. Local and deterministic: equal inputs give
 * equal maps. Any memory that CPUs reach.
 *
 * load          [E] rows that came for each logical expert, or any measure of its work, >= 0
 * num_experts   = E
 * num_physical  = P >= E, a multiple of num_ranks
 * nodes         [num_ranks] the node of each rank, numbered from 0; NULL: one node
 * map           [P] the result. Each rank gets exactly P / num_ranks copies, at most one of an
 *               expert as long as that is possible
 *
 * Experts go to nodes first if all nodes have equally many ranks and their number divides E: each
 * node gets E / nodes experts of balanced load, and all copies of an expert stay on its node. Then
 * each node, or the whole group, gives its spare places to copies of the experts with the most load
 * per copy, and packs copies into ranks, the heaviest first, each to the rank with the least load.
 *
 * EP_ERR_NULL, EP_ERR_RANGE, EP_ERR_NO_MEMORY: `map` is as it was.
 */
EpStatus ep_placement_balance(const double *load, int32_t num_experts, int32_t num_physical,
                              int32_t num_ranks, const int32_t *nodes, int32_t *map);

/**
 * Count where a rank's tokens go, by its routing alone. Local: needs no group, and no rank waits
 * for another one. Callers whose interface has such counts use it; ep_prepare does not need them.
 * Allocates nothing, can be captured, and its sums have no order that could change.
 *
 * backend        HOST or CUDA, which must reach all memory. CUDA: the current device is the
 *                stream's.
 * topk_idx       [T, K] INT32 or INT64, at most 2^31 - 1 entries. Negative indices, and those >= E,
 *                are no expert.
 * rank_tokens    [R] INT32: tokens that name an expert of the rank, each once. Its length is the
 *                number of ranks, 1 .. EP_MAX_RANKS.
 * expert_tokens  [E] INT32: entries that name the expert. Its length is the number of experts,
 *                1 .. EP_MAX_EXPERTS; ep_expert_range says whose they are.
 * token_in_rank  [T, R] UINT8: 1 where the token names an expert of the rank, else 0
 *
 * EP_ERR_UNSUPPORTED: this build does not have the backend.
 */
EpStatus ep_count_routing(EpBackend backend, const EpTensor *topk_idx, EpStream stream,
                          const EpTensor *rank_tokens, const EpTensor *expert_tokens,
                          const EpTensor *token_in_rank);

/**
 * A routing as a map: for each token a byte of every expert, as Megatron's routers give it. The first
 * function makes of it what ep_prepare and ep_dispatch take, the second one makes a map. Local, as
 * ep_count_routing: without a group, without allocations, and they can be captured.
 *
 * backend       HOST or CUDA, which must reach all memory. CUDA: the current device is the stream's.
 * map           [T, E] UINT8: not 0 where the token goes to the expert
 * probs         [T, E] FP32, or NULL: a weight of each expert. Read where the map is not 0.
 * topk_idx      [T, K] INT32, K at most EP_MAX_TOP_K: the token's experts, ascending, then -1.
 *               Where a token has more than K experts its last entry is E: no expert, which
 *               ep_prepare reports with EP_ERR_ROUTING.
 * topk_weights  [T, K] FP32, or NULL where probs is: the weights of the entries, 0 for -1
 */
EpStatus ep_read_routing_map(EpBackend backend, const EpTensor *map, const EpTensor *probs,
                             EpStream stream, const EpTensor *topk_idx,
                             const EpTensor *topk_weights);

/**
 * The opposite: each entry's weight at the place of its expert. So gradients of weights return to
 * the router.
 *
 * topk_idx      [T, K] INT32 or INT64; entries outside of 0 .. E - 1 are left out. A token names no
 *               expert twice.
 * topk_weights  [T, K] FP32, or NULL where probs is
 * map           [T, E] UINT8, or NULL: 1 at the experts that the token names, else 0
 * probs         [T, E] FP32, or NULL: the weights of the entries, elsewhere 0
 */
EpStatus ep_write_routing_map(EpBackend backend, const EpTensor *topk_idx,
                              const EpTensor *topk_weights, EpStream stream, const EpTensor *map,
                              const EpTensor *probs);

/** The order of slots in the receive buffer. */
typedef enum EpLayout {
    /** [rows, H]: one slot per (token, k). One slab per local expert, in expert order, padded to
     *  the alignment. Within a slab slots are ordered by (source rank, token, k). */
    EP_LAYOUT_EXPERT_MAJOR = 1,
    /** [rows, H]: one row per (token, rank), ordered by (source rank, token), not padded. Local
     *  expert ids and weights are [rows, K], with -1 and 0 for experts of other ranks. */
    EP_LAYOUT_FLAT = 2,
    /** [L, rows_per_expert, H]: one slab of fixed size per local expert, filled from its start. */
    EP_LAYOUT_BATCHED = 3,
    /** [R, N, H]: one row per (token, rank), as in FLAT, in one block for each source rank. Row
     *  (s, i) is the i-th token of rank s, in ascending order, that has an expert here.
     *  EpPlanTensors.source_rows has the number of rows of each block. N is the tensors' own: at
     *  least 1 and the T of every rank, at most the group's max_tokens; the same in all tensors of
     *  a call, and on all ranks (else EP_ERR_ORDER; EP_ERR_MISMATCH in latency mode), but a rank's
     *  own in the receive phase of a dispatch. Another call of the same plan may have another N. No
     *  row is ever lost and the handle needs no capacity. */
    EP_LAYOUT_RANK_MAJOR = 4
} EpLayout;

/** Flags of ep_max_recv_rows. */
#define EP_ROWS_DUPLICATES 1u /**< a token may name one expert more than once */

/**
 * Compute the most rows that rank `rank` can receive in one step, padding included. With this
 * max_recv_rows (for BATCHED: rows_per_expert) nothing can overflow. docs/semantics.md derives it.
 *
 * With G = num_ranks * max_tokens, L = experts of the rank, A = alignment, M = G * min(K, L) and
 * n = min(L, M), EXPERT_MAJOR gives min(L * ceil(G / A) * A, ceil((M + (A - 1) * n) / A) * A).
 * With EP_ROWS_DUPLICATES one expert may get G * K slots and the rank M = G * K, so both terms
 * grow: min(L * ceil(GK / A) * A, ceil((M + (A - 1) * n) / A) * A). FLAT gives G, or 0 for a rank
 * without experts. BATCHED gives ceil(G / A) * A (ceil(GK / A) * A with duplicates). RANK_MAJOR
 * gives G, the rows of its largest receive tensors.
 *
 * EP_ERR_RANGE (rank, layout, flags, or more than INT32_MAX rows, which no handle can have), and
 * the errors of an invalid configuration.
 */
EpStatus ep_max_recv_rows(const EpGroupConfig *config, int32_t num_ranks, int32_t rank,
                          EpLayout layout, unsigned flags, int64_t *rows);

/* ---- 5. Memory that peers reach ------------------------------------------------------------ */

/**
 * On a GPU backend, rows in memory that the other ranks of the group reach need no staging. Peers
 * write receive rows (recv_tokens, grad_expert_out) directly to their slots. Expert outputs
 * (expert_out, grad_recv_tokens) are used in place. A tensor may be any part of such memory.
 * Tensors in other memory also work and give the same bytes. The host backend uses all memory in
 * place; it has these calls so that one program works on both backends.
 *
 * The first four calls are collective over the group, in the same order on every rank, relative to
 * operations as well. They wait until this rank's operations have finished, and rendezvous with the
 * other ranks over the bootstrap: do not call them while a stream is being captured. If one rank
 * refuses its call, the call fails on all ranks: the others get EP_ERR_PEER with that rank's
 * sentence, and nothing has changed on any rank. Two kinds of ranks take no part: ranks without a
 * live group (NULL, destroyed, failed), and ranks that free NULL. Their peers wait for them up to
 * the deadline. A deadline that passes fails the group.
 *
 * A group has at most EP_MAX_WINDOWS such pieces of memory at a time. Destroying the group releases
 * those that are left. The memory is the caller's: library_bytes of ep_group_query and
 * ep_group_memory do not count it.
 */
#define EP_MAX_WINDOWS 32

/**
 * Allocate `bytes` >= 1 zeroed bytes, aligned to 128, that all ranks of the group reach: device
 * memory on a GPU backend, plain memory on the host backend. Ranks may ask for different sizes. On
 * a GPU backend with several ranks, each rank then takes as much memory as the largest request.
 * *out is written only on success. Free it with ep_mem_free; destroying the group also frees it.
 *
 * EP_ERR_RANGE (bytes, too many windows), EP_ERR_NO_MEMORY; EP_ERR_UNSUPPORTED if a GPU cannot
 * reach a peer; EP_ERR_ORDER if ranks make different calls.
 */
EpStatus ep_mem_alloc(EpGroup *group, size_t bytes, void **out);

/**
 * Free memory from ep_mem_alloc of this group, after the operations of all ranks that use it have
 * finished. NULL is allowed, does nothing and is not collective. EP_ERR_FOREIGN for any other
 * memory, freed memory included; EP_ERR_ORDER if ranks free memory of different calls.
 */
EpStatus ep_mem_free(EpGroup *group, void *memory);

/**
 * Let peers reach memory of the caller, in place and with its contents. On a GPU backend the memory
 * comes from ncclMemAlloc or the CUDA driver's virtual memory management, mapped for this rank's
 * GPU; if ranks share GPUs, from cudaMalloc. On the host backend any memory works. `memory` is a
 * multiple of 4096 (else EP_ERR_ADDRESS). `bytes` is at least 4096 (else EP_ERR_RANGE) and equal on
 * every rank (else EP_ERR_MISMATCH). The memory must not overlap other such memory of the group
 * (else EP_ERR_RANGE). It stays the caller's and must outlive its registration.
 */
EpStatus ep_window_register(EpGroup *group, void *memory, size_t bytes);

/** End a registration, after the operations of all ranks that use the memory have finished.
 *  `memory` is the registered address. EP_ERR_FOREIGN and EP_ERR_ORDER as for ep_mem_free. */
EpStatus ep_window_deregister(EpGroup *group, void *memory);

/** Ids of adopted windows are 0 .. EP_MAX_ADOPTED_WINDOWS - 1, beside EP_MAX_WINDOWS. */
#define EP_MAX_ADOPTED_WINDOWS 64

/** In place of an id, for windows in which ranks receive together: see ep_window_adopt. */
#define EP_WINDOW_PAIRED (-1)

/**
 * Use a window that the lent communicator already has (EpGroupConfig.nccl_comm). Local: no rank
 * waits for another, and it may be called at any time, also while operations run and while a stream
 * is being captured. Afterwards peers write receive rows in [memory, memory + bytes) directly.
 *
 * window  the ncclWindow_t, from ncclCommWindowRegister on the lent communicator. The host backend
 *         uses all memory in place and ignores it.
 * id      0 .. EP_MAX_ADOPTED_WINDOWS - 1, not in use: the window's name, the same on all ranks.
 *         libep cannot see whether ranks mean the same window by it; if not, rows go astray.
 *         Or EP_WINDOW_PAIRED.
 * memory  this rank's memory in the window, a multiple of 16. Ranks may adopt different parts of
 *         the window, of different sizes. NCCL before 2.29 does not tell where a window begins;
 *         with it, `memory` is the window's own start.
 * bytes   >= 1, up to the window's end. libep sees only the end of the allocation.
 *
 * A window with EP_WINDOW_PAIRED has no name. In an operation in which one rank receives in such a
 * window, every rank does, each in its own part of the same window, perhaps at another offset. So
 * each sender knows the window by its own receive tensor, and ranks need not number windows alike.
 * A sender without such a tensor fails the group with EP_ERR_ORDER.
 *
 * Peers must know the id before they send: every rank adopts the window, and the call has returned,
 * before that rank enqueues or replays an operation in which any rank receives there. Where a rank
 * has not, its kernel finds that before it stores rows, and fails the group with EP_ERR_ORDER,
 * which names the id and the rank that receives there; the others get EP_ERR_PEER. A graph that was
 * captured before the call keeps working: rows that it stages it goes on to stage. A graph that
 * stores rows in the window is replayed only while all ranks have it.
 *
 * The call waits for this GPU alone, until it has run two tiny kernels. They need a free
 * multiprocessor: while operations occupy all of them, the call waits for the first that ends, up
 * to the deadline, which then fails the group. So no rank may wait for the end of this call on
 * another rank before it enters operations that the other has enqueued.
 *
 * EP_ERR_UNSUPPORTED, on the CUDA backend: no communicator was lent, the group is on several nodes,
 * or the window does not reach all ranks.
 * EP_ERR_RANGE: `id` is out of range or in use, all ids are in use, `bytes` is 0, or the memory
 * overlaps another window of the group. EP_ERR_ADDRESS: `memory` is not a multiple of 16, is no
 * memory of the device, or is not in the window. EP_ERR_FOREIGN: NCCL does not know the window.
 * EP_ERR_TIMEOUT.
 */
EpStatus ep_window_adopt(EpGroup *group, void *window, int32_t id, void *memory, size_t bytes);

/**
 * Give an adopted window up, after the operations of all ranks that use it have finished, on all
 * ranks and before ncclCommWindowDeregister. Local, like ep_window_adopt. `memory` is the adopted
 * address; its id is free again. Destroying the group also gives it up. EP_ERR_FOREIGN for any
 * other memory. EP_ERR_TIMEOUT.
 */
EpStatus ep_window_release(EpGroup *group, void *memory);

/**
 * Find where a window of the lent communicator lies on this rank: *memory is its start, and *bytes
 * (`bytes` may be NULL, which is quicker) reach to the end of the allocation that *memory is in, so
 * perhaps beyond the window's end. Local; adopts nothing. For callers that have an ncclWindow_t and
 * an offset in place of an address.
 *
 * EP_ERR_UNSUPPORTED: the host backend, no communicator was lent, or NCCL before 2.29, which does
 * not tell. EP_ERR_FOREIGN: NCCL does not know the window. EP_ERR_ADDRESS: its memory comes neither
 * from ncclMemAlloc nor from the driver's virtual memory management.
 */
EpStatus ep_window_locate(EpGroup *group, void *window, void **memory, size_t *bytes);

/* ---- 6. Handles and plans ------------------------------------------------------------------ */

/**
 * A handle is a configuration: of a layer, or of a micro-batch. Any number may be live. A plan is
 * what ep_prepare makes from a step's routing and the four data operations read: all state of a
 * step, in one flat block of memory. Every operation names the plan that it uses, in one of two
 * ways:
 *
 *   a tensor   The memory is the caller's: [bytes] UINT8 on a multiple of 64, of at least
 *              ep_handle_memory bytes, with any contents before ep_prepare (latency mode: before
 *              ep_dispatch). One handle may have any number of plans; another handle of the same
 *              group with an equal configuration may use them. The bytes may be saved, moved and
 *              restored while no operation uses them. Operations alone touch this memory: it may be
 *              freed before the handle and the group are destroyed.
 *   NULL       The handle's own plan, in memory of the library (EP_PLANS_OWNED). The pipeline F0 F1
 *              B0 F2 B1 B2 then needs two handles.
 *
 * An operation uses its plan until it has run; one in two phases, until its receive phase has run.
 * A captured operation uses it in each replay, at the address that it was captured with.
 *
 * Ranks name plans of the same ep_prepare (latency mode: ep_dispatch); if they do not, the library
 * reports EP_ERR_ORDER. A named block that holds no plan is EP_ERR_NOT_PREPARED, a plan of another
 * group or configuration EP_ERR_FOREIGN, a damaged one EP_ERR_HANDLE_MEMORY. The host backend
 * refuses the call. On the CUDA backend nothing is read or waited for on the host, so all calls can
 * be captured in a graph; the kernel finds the error before it sends anything, and fails the group.
 * Captured work refers to the group and the plan alone: the handle may go before a replay.
 */
typedef struct EpHandle EpHandle;

/** How dispatch, and combine_backward if asked, quantise rows before they send them: see
 *  ep_dispatch. */
typedef enum EpQuant {
    EP_QUANT_NONE = 1,      /**< not at all: rows and scales are copied as they are */
    EP_QUANT_FP8 = 2,       /**< FP8_E4M3, one FP32 scale per 128 elements */
    EP_QUANT_FP8_UE8M0 = 3, /**< FP8_E4M3, one power of two per 128 elements, UE8M0 in a UINT8 */
    EP_QUANT_MXFP8 = 4,     /**< FP8_E4M3, one power of two per 32 elements, UE8M0 in a UINT8 */
    EP_QUANT_FP8_POW2 = 5,  /**< FP8_E4M3, one power of two per 128 elements, FP32 */
    EP_QUANT_NVFP4 = 6      /**< UINT8: two e2m1, that of the even element in the lower bits; one
                                 e4m3 per 16 elements in a UINT8; a global scale, which the call
                                 gives: EpExtras.global_scale. Dispatch alone */
} EpQuant;

/** The memory order of recv_scales. */
typedef enum EpScaleOrder {
    EP_SCALES_BY_ROW = 1,    /**< [rows, S]; BATCHED: [L, rows_per_expert, S]; RANK_MAJOR:
                                  [R, N, S] */
    EP_SCALES_BY_COLUMN = 2, /**< [S, rows]; BATCHED: [L, S, rows_per_expert], as grouped GEMMs need
                                 them; RANK_MAJOR: [R, S, N]. The stride of columns is the
                                 tensor's own number of rows */
    EP_SCALES_SWIZZLED = 3   /**< elements of one byte in tiles of 128 x 4, as block-scaled GEMMs of
                                 Blackwell read them: [rows, S], both rounded up to whole tiles;
                                 BATCHED: [L, rows_per_expert, S]; RANK_MAJOR: [R, N, S] likewise.
                                 In EXPERT_MAJOR the alignment is a multiple of 128 */
} EpScaleOrder;

/** The numbers of experts in recv_topk_idx. -1 stands for an expert of another rank, or none. */
typedef enum EpExpertIds {
    EP_IDS_LOCAL = 1, /**< 0 .. L - 1 */
    EP_IDS_GLOBAL = 2 /**< 0 .. E - 1, as in topk_idx. FLAT and RANK_MAJOR only */
} EpExpertIds;

/** What becomes of the rows past the last slab. */
typedef enum EpTail {
    EP_TAIL_KEEP = 0, /**< they are not written */
    EP_TAIL_ZERO = 1, /**< they become zero, their expert ids -1 */
    EP_TAIL_IDS = 2   /**< FLAT and RANK_MAJOR only: of them recv_topk_idx alone becomes -1, which
                           tells rows from tail without the counts */
} EpTail;

/** Which of the K weights of a rank-major row dispatch delivers. */
typedef enum EpRowWeights {
    EP_WEIGHTS_HERE = 0, /**< those of this rank's experts; the others are 0 */
    EP_WEIGHTS_ALL = 1   /**< all K, as the token's rank gave them */
} EpRowWeights;

/** What becomes of padding, the rows of a slab behind its last slot. FLAT and RANK_MAJOR have none.
 */
typedef enum EpPadding {
    EP_PADDING_ZERO = 1, /**< it becomes zero */
    EP_PADDING_KEEP = 2 /**< it is not written: for experts that go by the counts, or that keep each
                             row's results in that row */
} EpPadding;

/** Which plans the calls on a handle use. */
typedef enum EpPlans {
    EP_PLANS_OWNED = 1, /**< the handle's own, which the library allocates; a call may still name
                             one */
    EP_PLANS_NAMED = 2  /**< every call names one. Such a handle costs nothing: it is made and
                             destroyed in less than 5 us, also while a stream is being captured */
} EpPlans;

/** Configuration of a handle, equal on every rank except overflow, zero_tail, padding, scale_order,
 *  num_sms, plans, expert_ids and row_weights, which each rank may choose. ep_prepare (latency
 *  mode: ep_dispatch) compares it with the peers; every operation compares `id`. */
typedef struct EpHandleConfig {
    size_t struct_size;
    EpLayout layout;
    int32_t top_k;           /**< K of every step; EP_DEFAULT: any, up to the group's max_top_k */
    int32_t alignment;       /**< rows, a power of two; EP_DEFAULT: the group's */
    int64_t max_recv_rows;   /**< capacity in rows, 0 for exact sizing; EP_DEFAULT: the group's. Not
                                  used by BATCHED and RANK_MAJOR */
    int64_t rows_per_expert; /**< BATCHED: rows of each slab, > 0; other layouts: EP_DEFAULT */
    int32_t overflow;        /**< an EpOverflow; EP_DEFAULT: the group's */
    int32_t zero_tail; /**< an EpTail: whether dispatch and combine_backward also write the rows
                            past the last slab (BATCHED: past each slab; RANK_MAJOR: past each
                            source's rows), up to the end of the shortest of their outputs */
    int32_t mode;      /**< an EpMode; EP_DEFAULT: the group's */
    EpQuant quant;     /**< how dispatch quantises */
    EpScaleOrder scale_order;
    int32_t num_sms;        /**< multiprocessors that operations of this handle may use on the
                                 CUDA backend, >= 2, but no more than the group's; EP_DEFAULT or 0:
                                 the group's. May differ between ranks */
    EpPlans plans;          /**< whether the handle has a plan of its own */
    int32_t id;             /**< a number of the caller's, up to EP_MAX_HANDLE_ID, that operations
                                 compare with the peers and that sentences name; 0: none, not
                                 compared */
    EpExpertIds expert_ids; /**< numbers of experts in recv_topk_idx */
    int32_t row_weights;    /**< an EpRowWeights; EP_WEIGHTS_ALL in RANK_MAJOR only */
    EpPadding padding;      /**< whether dispatch and combine_backward write padding */
    EpQuant sum_quant;      /**< how the partial sums of ep_combine and ep_dispatch_backward travel:
                                 NONE, in the rows' type, or FP8, half as many bytes as BF16. Those
                                 operations compare it with the peers. See ep_combine, and
                                 docs/settings.md for when it pays */
    EpQuant grad_quant;     /**< how ep_combine_backward quantises grad_out: any but NVFP4. It
                                 compares it with the peers */
    int32_t reserved;       /**< 0 */
} EpHandleConfig;

#define EP_MAX_HANDLE_ID 4095

#define EP_HANDLE_CONFIG_INIT                                                                   \
    {                                                                                           \
        sizeof(EpHandleConfig), EP_LAYOUT_EXPERT_MAJOR, EP_DEFAULT, EP_DEFAULT, EP_DEFAULT,     \
            EP_DEFAULT, EP_DEFAULT, 0, EP_DEFAULT, EP_QUANT_NONE, EP_SCALES_BY_ROW, EP_DEFAULT, \
            EP_PLANS_OWNED, 0, EP_IDS_LOCAL, 0, EP_PADDING_ZERO, EP_QUANT_NONE, EP_QUANT_NONE,  \
            0                                                                                   \
    }

/** Compute the bytes of a plan of handles with this configuration on this rank. They depend on its
 *  layout, its K and its capacity. Local. config NULL: defaults. */
EpStatus ep_handle_memory(const EpGroup *group, const EpHandleConfig *config, size_t *bytes);

/** The memory of a handle on this rank. */
typedef struct EpHandleCost {
    size_t struct_size;
    EpMode mode;          /**< THROUGHPUT or LATENCY: what AUTO selects */
    int32_t reserved;     /**< 0 */
    int64_t plan_bytes;   /**< of a plan, as ep_handle_memory computes */
    int64_t buffer_bytes; /**< 0: all other memory is the group's */
} EpHandleCost;

#define EP_HANDLE_COST_INIT \
    { sizeof(EpHandleCost), EP_MODE_AUTO, 0, 0, 0 }

/** Compute the memory of a handle and its mode. Local. config NULL: defaults. */
EpStatus ep_handle_cost(const EpGroup *group, const EpHandleConfig *config, EpHandleCost *out);

/**
 * Create a handle. Local, in both modes, and ranks need not agree on an order. config NULL:
 * defaults. *out is written only on success. With EP_PLANS_OWNED the library allocates the plan: on
 * the CUDA backend no stream may then be under capture, and the call may wait for the device.
 *
 * EP_ERR_RANGE, EP_ERR_TOP_K, EP_ERR_ALIGNMENT: config. EP_ERR_UNSUPPORTED: latency mode without a
 * static size, or in a group without buffers for it (latency_sets); EP_SCALES_SWIZZLED with a
 * `quant` or a `grad_quant` whose scales are FP32; EP_QUANT_NVFP4 as grad_quant;
 * EP_IDS_GLOBAL outside FLAT and RANK_MAJOR; EP_WEIGHTS_ALL outside RANK_MAJOR. On the CUDA backend
 * also latency mode if the group's max_tokens times the handle's top_k, entries of two bytes, do
 * not fit into a multiprocessor's shared memory: the limit is about 100,000 entries.
 * EP_ERR_NO_MEMORY.
 */
EpStatus ep_handle_create(EpGroup *group, const EpHandleConfig *config, EpHandle **out);

/** Destroy a handle. Waits for nobody; operations under way and captured ones still run. A pending
 *  operation (see ep_dispatch_send) is dropped. The handle's own plan is gone, named plans stay.
 *  NULL is allowed. */
void ep_handle_destroy(EpHandle *handle);

/**
 * Get the handle's own plan as a tensor, which operations may name on other handles of the group
 * with an equal configuration (quant, sum_quant, grad_quant, scale_order, zero_tail, padding,
 * overflow, expert_ids, row_weights and num_sms may differ). *plan is written only on success; its
 * memory is valid until the handle is destroyed. EP_ERR_UNSUPPORTED with EP_PLANS_NAMED.
 */
EpStatus ep_handle_plan(const EpHandle *handle, EpTensor *plan);

/** The numbers of a handle's own plan, on the host. */
typedef struct EpHandleInfo {
    size_t struct_size;
    int64_t step;                 /**< number of times that this plan was made: by ep_prepare, or
                                       in latency mode by ep_dispatch; 0 if a call has named its
                                       memory as the plan to make */
    int64_t num_tokens;           /**< tokens of this rank that count: T, or num_tokens' value */
    int64_t top_k;                /**< K */
    int64_t recv_rows;            /**< rows that dispatch fills: the end of the last slab; BATCHED:
                                       L * rows_per_expert; RANK_MAJOR: R * max_tokens */
    int64_t needed_rows;          /**< rows that it would fill without a capacity; BATCHED: the
                                       rows_per_expert that would have been enough, a multiple of
                                       the alignment; RANK_MAJOR: the most rows of one source */
    int64_t dropped_slots;        /**< slots lost to the capacity */
    int64_t remote_rows_sent;     /**< (token, rank) rows that leave this rank; these three include
                                       rows whose slots were all lost */
    int64_t remote_rows_received; /**< (token, rank) rows that arrive from other ranks */
    int64_t local_rows;           /**< (token, rank) rows that stay here */
    int32_t num_local_experts;    /**< L */
    /** Arrays owned by the handle. FLAT and RANK_MAJOR rows are ordered by source; there the three
     *  arrays describe how a permutation by expert would order their entries. */
    const int32_t *expert_counts;  /**< [L] slots of each local expert, without lost ones */
    const int32_t *expert_padded;  /**< [L] rows of each slab, padding included, as far as they are
                                        below the capacity */
    const int32_t *expert_offsets; /**< [L + 1] first row of each slab, at most the capacity */
    EpMode mode;                   /**< THROUGHPUT or LATENCY */
    int32_t reserved;              /**< 0 */
} EpHandleInfo;

#define EP_HANDLE_INFO_INIT \
    { sizeof(EpHandleInfo), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, EP_MODE_AUTO, 0 }

/**
 * Read the numbers of the handle's own plan on the host, after ep_prepare has finished on its
 * stream; in latency mode, after ep_dispatch or ep_dispatch_wait has. With exact sizing, recv_rows
 * is read this way. The arrays are valid until the handle's next prepare; in latency mode, until
 * its next dispatch. EP_ERR_NOT_PREPARED if there is no plan or it is not finished.
 * EP_ERR_UNSUPPORTED with EP_PLANS_NAMED: the numbers of named plans are outputs of ep_prepare.
 */
EpStatus ep_handle_info(const EpHandle *handle, EpHandleInfo *out);

/**
 * Read on the host which token each receive row is of: its source rank, and the token's number
 * there. For programs that show or check the rows; the operations do not need it. Waits for the
 * work on `stream`. Local; refused as ep_handle_info is while an operation is pending.
 *
 * plan    as in ep_dispatch; in latency mode after its receive phase
 * rows    of the receive buffer, at least the plan's recv_rows (EP_ERR_BUFFER_SIZE). Those of a
 *         layout with blocks count through: L * rows_per_expert, R * max_tokens, whatever N the
 *         tensors have
 * ranks, tokens  host memory, [rows] each: -1 for rows that have no token. NULL serves without rows
 *
 * EP_ERR_UNSUPPORTED on several nodes of GPUs.
 */
EpStatus ep_plan_sources(EpHandle *handle, const EpTensor *plan, EpStream stream, int64_t rows,
                         int32_t *ranks, int32_t *tokens);

/**
 * As ep_plan_sources, and also which entry of its token each row is of.
 *
 * entries  host memory, [rows]: the k of topk_idx[token, k]; -1 for rows that have no token, and in
 *          the flat and rank-major layouts, where a row stands for all its token's entries here
 */
EpStatus ep_plan_entries(EpHandle *handle, const EpTensor *plan, EpStream stream, int64_t rows,
                         int32_t *ranks, int32_t *tokens, int32_t *entries);

/**
 * Read on the host how many tokens of each rank have travelled here, each counted once, whether or
 * not the capacity has left them slots. Waits for the work on `stream`. Local. Throughput mode
 * alone, and not on several nodes of GPUs: EP_ERR_UNSUPPORTED.
 *
 * counts  host memory, [R]
 */
EpStatus ep_plan_source_tokens(EpHandle *handle, const EpTensor *plan, EpStream stream,
                               int32_t *counts);

/* ---- 7. The five operations ---------------------------------------------------------------- */

/**
 * A step is one plan and the operations that use it. ep_prepare makes the plan from the routing,
 * ep_dispatch and ep_combine run forward, the other two compute their derivatives. `plan` is what
 * section 6 says: a block of the caller's, or NULL for the handle's own. With a named plan K is the
 * handle's top_k (by default the group's max_top_k), and T the number of rows of the token tensors.
 * `rows` in shapes is the receive tensor's own number of rows: at least the capacity, or with exact
 * sizing at least recv_rows.
 *
 * Argument errors are refused with the status that names them (EP_ERR_NDIM, TYPE, SHAPE, ROW_BYTES,
 * ADDRESS, TOKENS, TOP_K, BUFFER_SIZE, RANGE). On the CUDA backend the kernel compares T and `rows`
 * with a named plan; a difference fails the group (EP_ERR_SHAPE, EP_ERR_BUFFER_SIZE). Operations
 * without a plan are refused with EP_ERR_NOT_PREPARED. Backward in latency mode is refused with
 * EP_ERR_UNSUPPORTED. A failed group refuses all operations with the status of its failure.
 */

/** Optional outputs of ep_prepare; any may be NULL. Types INT32 or INT64. Memory as for the
 *  backend's tensors, or pinned host memory on a GPU backend. */
typedef struct EpPlanTensors {
    size_t struct_size;
    const EpTensor *expert_counts;  /**< [L] slots of each local expert, without lost ones */
    const EpTensor *expert_padded;  /**< [L] rows of each slab, padding included: a multiple of the
                                         alignment, unless the capacity cuts the slab. Of a cut slab
                                         the rows below the capacity, of later ones 0 */
    const EpTensor *expert_offsets; /**< [L + 1] first row of each slab, then recv_rows; or [L]: the
                                         first rows alone */
    const EpTensor *totals;         /**< [3]: recv_rows, needed_rows, dropped_slots */
    const EpTensor *source_counts;  /**< [L, R]: slots of each expert from each source rank; row e
                                         adds up to expert_counts[e]. In slot order the slots of one
                                         source are consecutive, sources ascending */
    const EpTensor *recv_rows;      /**< [1], as in totals */
    const EpTensor *needed_rows;    /**< [1], as in totals */
    const EpTensor *dropped_slots;  /**< [1], as in totals */
    const EpTensor *source_rows;    /**< [R] receive rows that each source rank's tokens fill,
                                         without padding and lost rows. RANK_MAJOR: rows of each
                                         block */
} EpPlanTensors;

#define EP_PLAN_TENSORS_INIT \
    { sizeof(EpPlanTensors), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/**
 * Make a plan from a step's routing. The operations that follow do no routing work.
 *
 * In latency mode ep_prepare only checks the arguments and records their addresses. The ep_dispatch
 * (or ep_dispatch_send) that follows reads topk_idx and num_tokens and makes the plan; `out` is
 * complete when that dispatch (or ep_dispatch_wait) is. Until then their memory stays valid and the
 * inputs stay unchanged; the EpTensor structs may go. A dispatch without a new prepare routes
 * again, by what that memory holds at that time. This is how graphs are replayed with new
 * routing. `plan` is checked and not kept: each dispatch names the plan that it writes.
 *
 * topk_idx    [T, K] INT32 or INT64: expert of each entry. Negative: no expert. >= E: treated as
 *             negative and reported by the next ep_group_status (EP_ERR_ROUTING). T may differ per
 *             rank, 0 included, up to max_tokens; K must be equal on all ranks. See EpDuplicates
 *             for an expert that is named twice.
 * num_tokens  [1] INT32 or INT64, or NULL: only the first num_tokens of the T rows count, so that
 *             buffers of a fixed shape can hold a varying number of tokens. Rows beyond it are not
 *             read in inputs, and become zero in outputs. In latency mode all token tensors still
 *             have T rows.
 * out         see EpPlanTensors; may be NULL.
 */
EpStatus ep_prepare(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                    const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out);

/** The arguments of ep_prepare, for a dispatch in latency mode that needs no ep_prepare. In
 *  throughput mode only `out` is given. */
typedef struct EpPrepare {
    size_t struct_size;
    const EpTensor *topk_idx;   /**< NULL in throughput mode */
    const EpTensor *num_tokens; /**< may be NULL */
    const EpPlanTensors *out;   /**< may be NULL */
} EpPrepare;

#define EP_PREPARE_INIT \
    { sizeof(EpPrepare), NULL, NULL, NULL }

/**
 * Send token rows, their weights and their scales to the slots of their experts.
 *
 * prepare            latency mode: the routing of this dispatch, or NULL for that of the handle's
 *                    last ep_prepare. Throughput mode: NULL, or outputs of ep_prepare, which this
 *                    dispatch then takes from the plan. source_counts and source_rows, which a plan
 *                    does not hold, are EP_ERR_UNSUPPORTED there.
 * tokens             [T, H] any type; rows of 16 .. max_row_bytes bytes, multiple of 16. If
 *                    ep_prepare took num_tokens, T is any number from that one to max_tokens. All
 *                    token tensors of a call have one T.
 * topk_weights       [T, K] FP32, or NULL
 * scales             [T, S] any type, rows a multiple of 4 bytes up to max_scale_bytes, or NULL.
 *                    Rows that are NVFP4 already are UINT8 [T, H/2] and [T, H/16]: H is a multiple
 *                    of 64, or the caller pads each row of scales to a multiple of 4 bytes
 * recv_tokens        [rows, H] of the tokens' type; rows >= the capacity, or with exact sizing >=
 *                    recv_rows. BATCHED: [L, rows_per_expert, H]. RANK_MAJOR: [R, N, H].
 * recv_topk_weights  [rows] FP32; FLAT: [rows, K]; BATCHED: [L, rows_per_expert]; RANK_MAJOR: [R,
 *                    N, K]. Required with topk_weights, otherwise NULL.
 * recv_scales        [rows, S] (BATCHED: [L, rows_per_expert, S]; RANK_MAJOR: [R, N, S]).
 *                    Required with scales, otherwise NULL, unless the handle quantises.
 * recv_topk_idx      FLAT and RANK_MAJOR only, optional: [rows, K] or [R, N, K] INT32 or
 *                    INT64, local expert or -1; with EP_IDS_GLOBAL its number in the group or -1
 *
 * The handle's scale_order sets the order of recv_scales; shapes here are for EP_SCALES_BY_ROW.
 * Swizzled, scale i of row r of a slab lies in tile (r / 128, i / 4), tiles by row; there at
 * 16 * (r % 32) + 4 * (r % 128 / 32) + i % 4. A slab is an expert's rows; FLAT: all rows;
 * RANK_MAJOR: a source's. Where S is no multiple of 4, the rest of each row's last word is zero.
 * Places of the last tile that stand for no row of the slab are not written.
 *
 * Padding rows within slabs become zero: tokens, weights and scales. EP_PADDING_KEEP: they are not
 * written.
 *
 * If the handle quantises (EpHandleConfig.quant), tokens are BF16, FP16 or FP32 with H a multiple
 * of 16, recv_tokens is FP8_E4M3, `scales` is NULL, and recv_scales is required. With blocks of
 * B = 128 or 32 elements there are S = ceil(H / B) scales per row, FP32 or UINT8. The rank that has
 * the token quantises the row once, so all its slots get the same bytes. For each block, with
 * rounding to nearest even after every single operation:
 *
 *     amax    = max(2^-100, largest |x| of the block's finite elements)
 *     scale   = amax / 448                       FP32
 *             = 2^ceil(log2(fl(amax / 448)))     powers of two; UE8M0: the byte is the exponent
 *                                                + 127
 *     inverse = 448 / amax                       FP32
 *             = 1 / scale                        powers of two
 *     q       = e4m3(x * inverse)                beyond +-448, infinities included: +-448;
 *                                                NaN: 0x7f
 *
 * So x is about scale * q. docs/semantics.md has the details.
 *
 * EP_QUANT_NVFP4: H is a multiple of 32, recv_tokens is UINT8 [rows, H/2], recv_scales UINT8
 * [rows, H/16]. The call is ep_dispatch_with, or ep_dispatch_send_with, whose extras give the
 * global scale g, commonly 448 * 6 / (largest |x| of the whole tensor). With amax as above:
 *
 *     scale   = e4m3(g * (amax * fl(1/6)))       beyond 448: 448
 *     inverse = 1 / (scale * (1 / g))            scale 0: 0
 *     q       = e2m1(x * inverse)                beyond +-6, infinities included: +-6; NaN: 6
 *
 * So x is about scale * q / g.
 */
EpStatus ep_dispatch(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                     const EpTensor *tokens, const EpTensor *topk_weights, const EpTensor *scales,
                     EpStream stream, const EpTensor *recv_tokens,
                     const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                     const EpTensor *recv_topk_idx);

/**
 * Return the experts' outputs and sum them: out[t] = sum over k of w * expert_out[slot(t, k)].
 *
 * expert_out    [rows, H] (BATCHED: [L, rows_per_expert, H]; RANK_MAJOR: [R, N, H]) BF16,
 *               FP16 or FP32. Padding and rows past the last slab are never read.
 * slot_weights  [rows] FP32 (BATCHED: [L, rows_per_expert]), as dispatch delivered them, or NULL
 *               for w = 1. FLAT and RANK_MAJOR ([R, N]): one weight per row.
 * topk_weights  expert-major or batched, instead of slot_weights: [T, K] FP32, the weights at the
 *               token's rank, for a dispatch that carried none; or NULL. In latency mode, and with
 *               EP_SUMS_BY_ENTRY in both modes. All ranks give them or none does (EP_ERR_ORDER).
 *               Weights of entries without a slot are not used. The bytes are those of a combine
 *               with the same weights as slot_weights. No derivative. In FLAT and RANK_MAJOR, and
 *               in throughput mode without EP_SUMS_BY_ENTRY: EP_ERR_UNSUPPORTED; with slot_weights:
 *               EP_ERR_NULL.
 * out           [T, H] of the same type. Every one of the T rows is written: exact zero for a
 *               token without live slots.
 *
 * Sums are in FP32, in a defined order. Each expert rank adds its terms in ascending k,
 * acc = fmaf(w, x, acc) from acc = +0 (acc + x if unweighted). A partial sum that travels to
 * another rank is rounded once to the rows' type. The token's rank adds the partial sums in
 * ascending rank from +0, its own unrounded, and rounds once to the type of out. Rounding is to
 * nearest even.
 *
 * In a group on several nodes (EpGroupInfo.num_nodes), the partial sums of each node other than the
 * token's are first added to one: in ascending rank from +0, all of them rounded, and the result
 * rounded once more to the rows' type. The token's rank adds it in the place of the node's lowest
 * rank: the lowest of all ranks there, with a slot of the token or not. So sums depend on routing,
 * placement of experts and nodes.
 *
 * In a group with EP_SUMS_BY_ENTRY (EpGroupConfig.sums) no partial sum exists. Every entry's row
 * travels as it is, with its weight if slot_weights are given, which all ranks or none then do
 * (EP_ERR_ORDER). The token's rank adds its entries that have a slot, on whatever rank, in
 * ascending k: acc = fmaf(w, x, acc) from acc = +0, or acc + x. It adds the biases and rounds once.
 * So sums depend on routing, weights and rows alone: not on ranks, nodes, placement, mode, layout
 * or backend, as long as no row is lost. ep_dispatch_backward adds in this order, too, and the
 * derivatives are those of other groups. docs/same_bits.md says more.
 *
 * With EpHandleConfig.sum_quant = EP_QUANT_FP8 sums are not rounded to the rows' type where they
 * travel. They are quantised from FP32, as ep_dispatch quantises a row of FP32, and each receiver
 * adds scale * e4m3, one rounding. The same holds for each sum of a node. H is then a multiple of
 * 16, else EP_ERR_ROW_BYTES. docs/semantics.md has the error of that.
 */
EpStatus ep_combine(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                    const EpTensor *slot_weights, const EpTensor *topk_weights, EpStream stream,
                    const EpTensor *out);

/**
 * Compute the derivative of ep_dispatch.
 *
 * grad_recv_tokens   [rows, H] (BATCHED: [L, rows_per_expert, H]) BF16, FP16 or FP32
 * grad_slot_weights  gradient of recv_topk_weights, same shape, FP32, or NULL
 * grad_tokens        [T, H]: sum over the token's slots, in the order that ep_combine defines
 * grad_topk_weights  [T, K] FP32: gradient of topk_weights; 0 for dead entries. Required with
 *                    grad_slot_weights, otherwise NULL.
 */
EpStatus ep_dispatch_backward(EpHandle *handle, const EpTensor *plan,
                              const EpTensor *grad_recv_tokens, const EpTensor *grad_slot_weights,
                              EpStream stream, const EpTensor *grad_tokens,
                              const EpTensor *grad_topk_weights);

/**
 * Compute the derivative of ep_combine.
 *
 * grad_out           [T, H] BF16, FP16 or FP32
 * slot_weights       as in the combine, or NULL if it was unweighted
 * expert_out         as in the combine; required with grad_slot_weights, otherwise NULL
 * grad_expert_out    like expert_out: w * grad_out[t], rounded to FP32 and then to the rows' type,
 *                    or grad_out[t] itself if unweighted; padding as in ep_dispatch
 * grad_slot_weights  like slot_weights, FP32: dot(expert_out[slot], grad_out[t]), padding
 *                    likewise; or NULL. Deterministic, summed in FP32.
 *
 * If the handle quantises gradients (EpHandleConfig.grad_quant), the derivative is that of an
 * unweighted combine: slot_weights, expert_out and grad_slot_weights are NULL (EP_ERR_UNSUPPORTED).
 * Rows of grad_out, with H a multiple of 16, are quantised as ep_dispatch quantises tokens, by the
 * same arithmetic. grad_expert_out is FP8_E4M3, and the call is ep_combine_backward_with, whose
 * extras give grad_scales.
 */
EpStatus ep_combine_backward(EpHandle *handle, const EpTensor *plan, const EpTensor *grad_out,
                             const EpTensor *slot_weights, const EpTensor *expert_out,
                             EpStream stream, const EpTensor *grad_expert_out,
                             const EpTensor *grad_slot_weights);

/**
 * Tensors that a call takes besides its own: for the functions whose names end in _with, which do
 * what the function without that ending does. A member that is NULL asks for nothing, and all of
 * them belong to this rank alone: ranks need not give the same ones. A member that a call does not
 * take is refused with EP_ERR_UNSUPPORTED; the list below names the calls that do.
 *
 * bias0, bias1  [T, H] of the rows' type, like the output that they are added to. Each token's sum
 *               is out = round(sum + bias0 + bias1): added in FP32 in this order, and rounded once.
 *               Nothing of them travels. With num_tokens, rows past it are zero and their biases
 *               are not read. The gradient of a bias is the gradient of the output. Taken by
 *               ep_combine_with, ep_combine_wait_with and ep_dispatch_backward_with.
 * global_scale  [1] FP32, 2^-64 to 2^64, of this rank's tokens; required with EP_QUANT_NVFP4, else
 *               NULL. Ranks give the same number if their rows are to be multiplied alike; it is
 *               not compared. Another number is EP_ERR_RANGE: the host backend refuses the call; on
 *               the CUDA backend, which reads it when the kernel runs, it fails the group, and
 *               nothing is written. Taken by ep_dispatch_with and ep_dispatch_send_with.
 * grad_scales   output: the scales of grad_expert_out, like recv_scales of ep_dispatch and in the
 *               handle's scale_order; padding likewise. Required where the handle has a grad_quant,
 *               else NULL. Taken by ep_combine_backward_with.
 *
 * The members below are statistics: INT64 counters of the caller's, to which the call adds. So the
 * caller sets them to 0 when it likes. A replayed graph adds again. Memory as for tensors, on a multiple
 * of 8; no two counters of a call overlap (EP_ERR_ADDRESS). The memory stays valid until the call
 * has run, and as long as a graph may replay it. On the CUDA backend calls on several streams may
 * add to the same counters. A call that is refused adds nothing; one that fails later may have
 * added a part. No other output changes by a bit.
 *
 * expert_tokens  [L] slots of each local expert, without lost ones: the plan's expert_counts, added
 *                by each dispatch of it. INT32 serves, too. Taken by ep_dispatch_with and
 *                ep_dispatch_wait_with.
 * peer_rows      [R] rows that this rank has sent to each rank, those whose slots are all lost
 *                included: tokens in ep_dispatch and ep_combine_backward, partial sums in the other
 *                two. The rank's own place counts the rows that stay. Every pair of a token and a
 *                rank with experts of it is a row, in every layout. Taken by the four data
 *                operations and the send phases.
 *                With EP_SUMS_BY_ENTRY, ep_combine and ep_dispatch_backward count a row for each
 *                entry that has a slot.
 * peer_bytes     [R] their bytes on the way: elements, or the codes of rows and sums that are
 *                quantised, scales, and the K weights (ep_dispatch_backward: values) of each row.
 *                Without headers and padding of messages, and without the topk_weights of
 *                ep_combine. Taken where peer_rows is.
 * peer_wait_ns   [R] nanoseconds for which this rank has waited for each rank, once it could do no
 *                more by itself; 0 for ranks that were there, and for the rank itself.
 *                CUDA: until the other rank has entered the operation, as fine as the GPU's global
 *                timer, and for all ranks at once; so a rank is waited for as long as it is late,
 *                whoever else is. Host: all of the call's waits, one rank after another: who comes
 *                while another one is waited for is not waited for. Taken by ep_prepare_with in
 *                throughput mode, the four data operations and all phases. On the CUDA backend
 *                send phases add nothing; on the host backend receive phases do not.
 * peer_longest_wait_ns  [R] the longest wait of one call: becomes the maximum of what it holds and
 *                what the call adds to peer_wait_ns. Taken where peer_wait_ns is.
 *
 * On several nodes of GPUs a row is counted for each rank that it passes on: by its token's rank
 * for the ranks of the own node and for the relay of each other node (ep_group_relay), and by the
 * relay for the ranks of its node; sums on their way back likewise. So what this rank sends to the
 * ranks that it relays for counts there, with the sums of others. Waits are those within the node,
 * of each part of the operation by itself; what comes over the network adds nothing, and
 * ep_prepare_with adds none.
 *
 * ready and done let kernels of the caller's work on some rows while others still travel. Receive
 * rows are cut into blocks of block_rows rows, the last one shorter, each with an INT32 word. In
 * BATCHED every expert's rows are cut by themselves, in RANK_MAJOR every source's: n words for each
 * of L or R. In EXPERT_MAJOR block_rows divides the handle's alignment (EP_ERR_ALIGNMENT), so a
 * block lies in one slab. docs/overlap.md shows a kernel on either side of the words.
 *
 * ready  [words] at least one for each block of recv_tokens, at most EP_MAX_BLOCK_WORDS. The caller
 *        sets them to 0, in stream order before the operation and before whoever reads them. A word
 *        stays 0 until all rows of its block are there, with weights, scales and ids; padding that
 *        is zeroed counts as there. Then it becomes 1 + the rows of the block that hold a token.
 *        Blocks without such rows become 1. All outputs of the plan are there before any word
 *        changes. If the operation fails, words may stay 0. A word that was not 0 before the call
 *        tells its reader nothing. Taken by ep_dispatch_with and ep_dispatch_wait_with.
 * done   [words] likewise for expert_out. The operation reads the rows of a block only after it has
 *        seen a word of at least `expected`, 1 or more. The caller sets words to 0 in stream order
 *        before the operation and before the producer of the rows. A word left from an earlier step
 *        counts as done, and its rows are read as they are. Blocks without rows of tokens are not
 *        waited for. A word that does not come within the group's timeout fails the group, with
 *        EP_ERR_TIMEOUT and the block; on the host backend only the call, before it writes
 *        anything. Rows are summed in the order of tokens, so a producer overlaps with the
 *        operation if it completes the rows of lower tokens first. Taken by ep_combine_with and
 *        ep_combine_send_with.
 *
 * On the host backend all ready words are full when the call returns, and the call waits for all
 * done words before it begins. On the CUDA backend kernels read and write the words while the
 * operation runs, so it starts only when the work before it on its stream is complete. It and the
 * other kernel have to leave each other multiprocessors (num_sms): else both end at their
 * deadlines.
 */
#define EP_MAX_BLOCK_WORDS 65536

typedef struct EpExtras {
    size_t struct_size;
    const EpTensor *bias0;
    const EpTensor *bias1;
    const EpTensor *expert_tokens;
    const EpTensor *peer_rows;
    const EpTensor *peer_bytes;
    const EpTensor *peer_wait_ns;
    const EpTensor *peer_longest_wait_ns;
    const EpTensor *global_scale;
    const EpTensor *ready;
    const EpTensor *done;
    int32_t block_rows; /* of ready or done; 0 without them */
    int32_t expected;   /* of done; 0 without it */
    const EpTensor *grad_scales;
} EpExtras;

#define EP_EXTRAS_INIT \
    { sizeof(EpExtras), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL }

/** As ep_prepare. extras: may be NULL, and is refused in latency mode, where ep_dispatch waits. */
EpStatus ep_prepare_with(EpHandle *handle, const EpTensor *plan, const EpTensor *topk_idx,
                         const EpTensor *num_tokens, EpStream stream, const EpPlanTensors *out,
                         const EpExtras *extras);

/** As ep_dispatch. extras: may be NULL. */
EpStatus ep_dispatch_with(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                          const EpTensor *tokens, const EpTensor *topk_weights,
                          const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                          const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                          const EpTensor *recv_topk_idx, const EpExtras *extras);

/** As ep_combine. extras: may be NULL. */
EpStatus ep_combine_with(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                         const EpTensor *slot_weights, const EpTensor *topk_weights,
                         EpStream stream, const EpTensor *out, const EpExtras *extras);

/** As ep_dispatch_backward. extras: may be NULL. With a bias it is a combine that also returns
 *  values, one for each entry. */
EpStatus ep_dispatch_backward_with(EpHandle *handle, const EpTensor *plan,
                                   const EpTensor *grad_recv_tokens,
                                   const EpTensor *grad_slot_weights, EpStream stream,
                                   const EpTensor *grad_tokens, const EpTensor *grad_topk_weights,
                                   const EpExtras *extras);

/** As ep_combine_backward. extras: may be NULL. */
EpStatus ep_combine_backward_with(EpHandle *handle, const EpTensor *plan, const EpTensor *grad_out,
                                  const EpTensor *slot_weights, const EpTensor *expert_out,
                                  EpStream stream, const EpTensor *grad_expert_out,
                                  const EpTensor *grad_slot_weights, const EpExtras *extras);

/**
 * The send and receive phases of ep_dispatch and ep_combine, in latency mode only (otherwise
 * EP_ERR_UNSUPPORTED). When the send phase has run, in the stream's order, its inputs may be
 * overwritten. The receive phase (..._wait) completes the outputs, those of ep_prepare included.
 * Between the phases nothing runs for the caller, no multiprocessor is held, and the stream is free
 * for other work.
 *
 *     ep_dispatch_send(a, ...)     ep_dispatch_send(b, ...)
 *     ep_dispatch_wait(a, ...)     (experts of a)
 *     ep_combine_send(a, ...)      ep_dispatch_wait(b, ...)     ...
 *
 * The two phases together do what the whole call does, with the same bytes. They share its
 * arguments: what is sent goes to the send phase, what is received to the receive phase. Send
 * phases are collective, in the same order on every rank, like all operations. All ranks split an
 * operation or none does: else EP_ERR_ORDER, and the group has failed. Receive phases may
 * come in any order, which may differ between ranks. On the host backend the send phase may wait
 * for the peers' send phases, and the receive phase never waits. On the CUDA backend the send phase
 * never waits, except that ep_combine_send with topk_weights waits in its kernel for the peers'
 * send phases, whose weights it needs. The receive phase waits in its kernel.
 *
 * Between the phases the operation is pending, and the handle accepts nothing but its receive
 * phase, which uses the plan of the send phase. Any other operation on the handle, a second send
 * and ep_handle_info are refused with EP_ERR_ORDER, and so is a wait without its send. Other
 * handles of the group are not affected. Destroying a handle with a pending operation drops that
 * operation.
 *
 * Operations in flight lie in the group's sets of buffers, in turn: a send phase, or a whole
 * operation, is refused with EP_ERR_ORDER while the operation that was sent latency_sets send
 * phases before it is still pending. Where graphs are replayed between the phases, the kernel finds
 * that, and fails the group.
 */
EpStatus ep_dispatch_send(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                          const EpTensor *tokens, const EpTensor *topk_weights,
                          const EpTensor *scales, EpStream stream);
EpStatus ep_dispatch_wait(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                          const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                          const EpTensor *recv_topk_idx);
EpStatus ep_combine_send(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                         const EpTensor *slot_weights, const EpTensor *topk_weights,
                         EpStream stream);
EpStatus ep_combine_wait(EpHandle *handle, EpStream stream, const EpTensor *out);

/** As the phases without that ending. extras: may be NULL; each phase takes what it does itself:
 *  the send phase counts rows and bytes, and the receive phase tokens. A bias is read by the
 *  receive phase, so it may be computed between the two. */
EpStatus ep_dispatch_send_with(EpHandle *handle, const EpTensor *plan, const EpPrepare *prepare,
                               const EpTensor *tokens, const EpTensor *topk_weights,
                               const EpTensor *scales, EpStream stream, const EpExtras *extras);
EpStatus ep_dispatch_wait_with(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                               const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                               const EpTensor *recv_topk_idx, const EpExtras *extras);
EpStatus ep_combine_send_with(EpHandle *handle, const EpTensor *plan, const EpTensor *expert_out,
                              const EpTensor *slot_weights, const EpTensor *topk_weights,
                              EpStream stream, const EpExtras *extras);
EpStatus ep_combine_wait_with(EpHandle *handle, EpStream stream, const EpTensor *out,
                              const EpExtras *extras);

/* ---- 8. Status of a group, settings -------------------------------------------------------- */

/**
 * Some errors appear only while operations run: wrong routing indices, lost slots, a peer that is
 * missing, ranks that disagree. ep_group_status reports these asynchronous errors. Settings come
 * from the environment and are read when a group is created.
 */

/** Details of what ep_group_status reports; -1 if a number does not apply. */
typedef struct EpFinding {
    size_t struct_size;
    EpStatus status;  /**< EP_OK: nothing to report */
    int32_t rank;     /**< rank that found the error */
    int32_t peer;     /**< rank that the error concerns */
    int64_t token, k; /**< EP_ERR_ROUTING: the first such entry of one step */
    int64_t expected; /**< EP_ERR_ROUTING: E. EP_ERR_OVERFLOW: capacity. Waits: expected round.
                           EP_ERR_ORDER: this rank's value, or the id of the window that it lacks */
    int64_t seen;     /**< EP_ERR_ROUTING: index. EP_ERR_OVERFLOW: rows needed. Waits: round seen.
                           EP_ERR_ORDER: the other rank's value */
    int64_t count;    /**< number of such entries or slots */
    char phase[24];   /**< operation: "prepare", "dispatch", ... */
} EpFinding;

#define EP_FINDING_INIT \
    { sizeof(EpFinding), EP_OK, -1, -1, -1, -1, -1, -1, 0, "" }

/**
 * Return what went wrong in a group since the last query, without waiting. Routing errors and
 * overflows are about data: they are reported once, then cleared. A failed group (a deadline
 * passed, a peer failed, ranks disagreed, it was aborted) stays failed, and every operation on it
 * returns the same status. `out` may be NULL; ep_last_error() returns the sentence.
 */
EpStatus ep_group_status(EpGroup *group, EpFinding *out);

/** One setting, read from the environment when a group is created. */
typedef struct EpSetting {
    size_t struct_size;
    const char *name;          /**< "LIBEP_TIMEOUT" */
    const char *type;          /**< "seconds", "bytes", "choice: a|b", "text" */
    const char *default_value; /**< as written in the environment */
    const char *value;         /**< value in use; valid during the visit */
    const char *doc;           /**< one line */
} EpSetting;

/**
 * Visit every setting. visit may be NULL, to check only. After the visit, returns EP_ERR_SETTING if
 * the environment has a LIBEP_ name that is not a setting, or a value that does not parse;
 * ep_last_error() names it. (ep_group_create warns about the former and refuses the latter.)
 */
EpStatus ep_settings(void (*visit)(const EpSetting *setting, void *context), void *context);

#ifdef __cplusplus
}
#endif

#endif
