/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_EP_H
#define EP_EP_H

/**
 * libep: expert-parallel communication for Mixture-of-Experts models.
 *
 * R ranks form an EP group and share E experts. Each rank holds tokens; a router names K experts
 * for every token. libep carries each token to the ranks that own its experts, lays the rows out
 * expert by expert as grouped GEMMs want them, and brings the experts' outputs back, summed, to
 * the rank the token came from. It does so forward and backward:
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
 *     2. Tensors                          6. Handles: one per layer
 *     3. Bootstrap: how ranks meet        7. The five operations
 *     4. Groups                           8. Status of a group, settings
 *
 * A first program, one rank of a group:
 *
 *     EpGroupConfig config = EP_GROUP_CONFIG_INIT;
 *     config.num_experts = 256, config.max_tokens = 2048, config.max_top_k = 8;
 *     config.max_row_bytes = 7168 * 2;
 *     EpGroup *group;    ep_group_create(&bootstrap, &config, &group);
 *     EpHandle *layer;   ep_handle_create(group, NULL, NULL, 0, &layer);
 *
 *     ep_prepare(layer, &topk_idx, NULL, stream, NULL);
 *     ep_dispatch(layer, &tokens, &topk_weights, NULL, stream,
 *                 &recv_tokens, &recv_weights, NULL, NULL);
 *     ... experts ...
 *     ep_combine(layer, &expert_out, &recv_weights, stream, &out);
 *
 * Rules that hold everywhere
 *   - Every operation is collective over its group, in the same order on every rank. Create the
 *     handles of a group in the same order on every rank, too. Ranks that disagree are told so
 *     (EP_ERR_ORDER) instead of exchanging garbage.
 *   - A call returns an EpStatus; ep_last_error() has the sentence. A refused call did not take
 *     part and left its outputs alone: correct the argument and call again, the peers wait.
 *   - The library never exits, aborts, traps or writes to stdout. Every wait has a deadline.
 *   - The same inputs give the same bytes, on every run and on every backend.
 *   - Calls are asynchronous on the caller's stream; on the host backend they have finished when
 *     they return and the stream is ignored (pass NULL). Nothing is allocated after create.
 *   - One thread at a time calls into one group of one rank. Different groups are independent.
 *   - Structs begin with their size, which EP_..._INIT fills in. They grow only at the end, and
 *     programs that were compiled before one grew go on working: new fields have their defaults.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Version, status, errors ------------------------------------------------------------ */

#define EP_VERSION_MAJOR 0
#define EP_VERSION_MINOR 1
#define EP_VERSION_PATCH 0

/** Version of the library at run time: major * 10000 + minor * 100 + patch. */
int ep_version(void);

/**
 * Every status: X(name, number, text). Numbers are pinned and never reused.
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
    X(EP_ERR_ADDRESS, 8, "an address is not aligned as required")                               \
    X(EP_ERR_TOKENS, 9, "more tokens than the group's max_tokens")                              \
    X(EP_ERR_TOP_K, 10, "more experts per token than the group's max_top_k")                    \
    X(EP_ERR_ALIGNMENT, 11, "alignment is not a power of two")                                  \
    X(EP_ERR_BUFFER_SIZE, 12, "a buffer is too small")                                          \
    X(EP_ERR_ROUTING, 13, "a routing index names no expert of the group")                       \
    X(EP_ERR_OVERFLOW, 14, "more rows arrived than the receive capacity holds")                 \
    X(EP_ERR_NOT_PREPARED, 15, "the handle holds no plan: ep_prepare comes first")              \
    X(EP_ERR_DESTROYED, 16, "the object was destroyed")                                         \
    X(EP_ERR_HANDLE_MEMORY, 17, "the handle's memory was overwritten")                          \
    X(EP_ERR_FOREIGN, 18, "the memory or handle belongs to another group or handle")            \
    X(EP_ERR_MISMATCH, 19, "ranks were configured differently")                                 \
    X(EP_ERR_ORDER, 20, "ranks called operations in a different order or with different sizes") \
    X(EP_ERR_TIMEOUT, 21, "a rank did not arrive before the deadline")                          \
    X(EP_ERR_PEER, 22, "another rank of the group failed")                                      \
    X(EP_ERR_NO_MEMORY, 23, "out of memory")                                                    \
    X(EP_ERR_SETTING, 24, "an EP_ environment setting is unknown or malformed")                 \
    X(EP_ERR_UNSUPPORTED, 25, "not supported by this build, machine or backend")                \
    X(EP_ERR_BOOTSTRAP, 26, "the bootstrap reported a failure")                                 \
    X(EP_ERR_SYSTEM, 27, "a call to the operating system failed")

typedef enum EpStatus {
#define EP_STATUS_ENUM(name, number, text) name = number,
    EP_STATUS_MAP(EP_STATUS_ENUM)
#undef EP_STATUS_ENUM
} EpStatus;

/** Name and text of a status, as in "EP_ERR_TYPE: a tensor has ...". Never NULL; static storage. */
const char *ep_status_string(EpStatus status);

/**
 * The sentence of the calling thread's last failed call: rank, call, argument, expected and got.
 * "" if none failed. Valid until this thread's next failing call; static per thread.
 */
const char *ep_last_error(void);

/**
 * Set the sentence that ep_last_error() returns on this thread, and return `status`: for authors
 * of bootstraps, whose callbacks end in `return ep_set_last_error(EP_ERR_..., "rank 3 is gone");`.
 */
EpStatus ep_set_last_error(EpStatus status, const char *sentence);

/* ---- 2. Tensors ---------------------------------------------------------------------------- */

/** Element types. Combine sums BF16, FP16 and FP32; dispatch carries any of them as bytes. */
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
 * `data` of row tensors (tokens, expert outputs, their gradients) is 16-byte aligned and their
 * rows are multiples of 16 bytes; that of scales is aligned to 4 bytes, that of others as their
 * elements are. `data` may be anything where the shape has a 0. What a call writes must overlap
 * nothing else that the call is given, which is not checked; what it only reads may be given more
 * than once.
 *
 * On the host backend `data` is plain memory. On the CUDA backend it is memory of the group's
 * device, managed memory or pinned host memory; anything else is refused with EP_ERR_ADDRESS, as
 * far as the setting EP_CHECK has it looked at. Where the GPU reads plain memory by itself, that is
 * allowed, too.
 */
typedef struct EpTensor {
    size_t struct_size;
    void *data;
    EpType type;
    int32_t ndim;
    int64_t shape[EP_MAX_DIMS];
} EpTensor;

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

/** Bytes of one element, or 0 for a value that is no EpType. */
size_t ep_type_bytes(EpType type);

/** A cudaStream_t, or NULL. The host backend ignores it. */
typedef void *EpStream;

/* ---- 3. Bootstrap: how ranks meet ---------------------------------------------------------- */

/**
 * A bootstrap is what libep needs of the outside to set up a group: who am I, how many are we,
 * gather a few bytes from everyone, wait for everyone. ep_bootstrap_mpi (ep_mpi.h) makes one from
 * a communicator, ep_bootstrap_local makes R of them for R threads of one process, and a framework
 * that already knows its ranks fills in the struct itself: rank, size, allgather and barrier are
 * enough where the ranks share a node or a GPU backend serves them.
 *
 * Callbacks return EP_OK or an error (use ep_set_last_error for the sentence). They are called
 * when groups are created and destroyed, allgather also when memory that peers reach is (section
 * 5) and handles in latency mode are (section 6); only isend, irecv and test also in operations.
 * The struct is copied by ep_group_create; what `context` points to must outlive the groups made
 * from it.
 */
typedef struct EpBootstrap {
    size_t struct_size;
    int32_t rank;  /**< 0 .. size - 1 */
    int32_t size;  /**< number of ranks */
    void *context; /**< passed to every callback */

    /** Gather `bytes` bytes of every rank into out[size * bytes], in rank order. */
    EpStatus (*allgather)(void *context, const void *in, void *out, size_t bytes,
                          double timeout_seconds);
    /** Return when every rank has called. */
    EpStatus (*barrier)(void *context, double timeout_seconds);

    /**
     * Optional (NULL: POSIX shared memory is used): collective over all ranks; `bytes` zeroed
     * bytes for each rank, 64-byte aligned, that all ranks of the same `node` can load and store.
     * segments[r] becomes rank r's segment as mapped here, NULL where r is on another node.
     * *memory is what share_free takes; `together` is 1 where all ranks are known to call it now,
     * 0 where some may be gone: then it must not wait for them.
     */
    EpStatus (*share)(void *context, int32_t node, size_t bytes, double timeout_seconds,
                      void **segments, void **memory);
    void (*share_free)(void *context, void *memory, int together);

    /**
     * Optional (NULL: all ranks of a group on the host backend must share a node): nonblocking
     * point-to-point messages, in order for each (pair of ranks, tag). test sets *done, and
     * releases the request when it is done. cancel releases it without waiting.
     */
    EpStatus (*isend)(void *context, int32_t peer, int32_t tag, const void *data, size_t bytes,
                      void **request);
    EpStatus (*irecv)(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                      void **request);
    EpStatus (*test)(void *context, void **request, int *done);
    void (*cancel)(void *context, void **request);

    /** Optional: free `context`; called by ep_bootstrap_destroy. */
    void (*destroy)(void *context);
} EpBootstrap;

#define EP_BOOTSTRAP_INIT \
    { sizeof(EpBootstrap), 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/**
 * Bootstraps for `size` (1 to 1024) ranks that are threads of this process: out[r] belongs to the
 * thread that plays rank r. Destroy each once.
 */
EpStatus ep_bootstrap_local(int32_t size, EpBootstrap *out);

/** Free what a bootstrap owns. Destroy its groups first. NULL is allowed. */
void ep_bootstrap_destroy(EpBootstrap *bootstrap);

/* ---- 4. Groups ----------------------------------------------------------------------------- */

/** A set of ranks that share E experts. Opaque; a process may have several. */
typedef struct EpGroup EpGroup;

/**
 * Who moves the bytes. HOST takes tensors in plain memory, CUDA in memory that the rank's GPU
 * reaches, so a program that says AUTO asks ep_group_query which one it got before it allocates; a
 * program whose tensors are in either kind of memory in any case names its backend.
 *
 * AUTO means CUDA where every rank has a usable GPU, of its own unless EP_SHARE_GPUS lets ranks
 * share, and HOST elsewhere. All ranks come to the same choice, and EpGroupInfo's reason (and
 * ep_info) says what decided it.
 */
typedef enum EpBackend {
    EP_BACKEND_AUTO = 1, /**< setting EP_BACKEND, else the best that every rank can have */
    EP_BACKEND_HOST = 2, /**< CPUs: shared memory within a node, messages between nodes */
    EP_BACKEND_CUDA = 3  /**< GPUs that reach each other's memory */
} EpBackend;

/** What happens to slots past the receive capacity. Either way they are not written, in slot
 *  order, the plan counts them, and every other slot is right. */
typedef enum EpOverflow {
    EP_OVERFLOW_ERROR = 1, /**< ep_group_status also reports EP_ERR_OVERFLOW */
    EP_OVERFLOW_DROP = 2   /**< losing rows is part of the model: counted, no error */
} EpOverflow;

/**
 * What a handle is made for. Both modes have the same calls, layouts, bytes and statuses.
 *
 * THROUGHPUT: ep_prepare makes the plan, the other four operations use it. Any size, exact sizing
 * included, and backward.
 *
 * LATENCY, for the few tokens of a decoding step: ep_prepare records where the routing lies, and
 * ep_dispatch does all in one launch; it can be had in two halves, as ep_combine can, with
 * computation in between. Sizes are static (a capacity, or BATCHED), there is no backward, and a
 * handle has buffers of its own that peers reach: see ep_handle_cost.
 *
 * AUTO: LATENCY where max_tokens is at most EP_LATENCY_TOKENS and sizes are static, else
 * THROUGHPUT. A program that says so keeps to what holds in both.
 */
typedef enum EpMode { EP_MODE_AUTO = 1, EP_MODE_THROUGHPUT = 2, EP_MODE_LATENCY = 3 } EpMode;

/** Most tokens per rank and step for which AUTO means LATENCY. */
#define EP_LATENCY_TOKENS 256

/** "Use the default", in fields that say so. */
#define EP_DEFAULT (-1)

/**
 * Configuration of a group. Fields marked = must have the same value on every rank;
 * ep_group_create compares them and names the field, the ranks and both values otherwise.
 */
typedef struct EpGroupConfig {
    size_t struct_size;
    int32_t num_experts;     /**< = E >= 1. Rank r owns a contiguous block: see ep_expert_range */
    int32_t max_tokens;      /**< = most tokens a rank brings in one step, >= 1 */
    int32_t max_top_k;       /**< = most experts per token, 1 .. EP_MAX_TOP_K */
    int64_t max_row_bytes;   /**< = largest row of any call, gradients included; multiple of 16,
                                  at most EP_MAX_ROW_BYTES */
    int64_t max_scale_bytes; /**< = largest row of scales, 0 if none travel; multiple of 4 */
    int32_t alignment;       /**< = slabs are padded to multiples of this power of two */
    int64_t max_recv_rows;   /**< = receive capacity in rows, or 0 for exact sizing: after
                                  ep_prepare read the total, then allocate (see ep_handle_info) */
    EpOverflow overflow;     /**< = */
    EpBackend backend;       /**< = AUTO, HOST or CUDA */
    double timeout_seconds;  /**< deadline of every wait, > 0, or EP_DEFAULT: setting EP_TIMEOUT */
    void *nccl_comm;         /**< a borrowed ncclComm_t (ep_nccl.h), or NULL; equal on all ranks in
                                  that it is given */
    int32_t device;          /**< this rank's CUDA device, or EP_DEFAULT: see below */
    EpMode mode;             /**< = mode of handles that do not choose their own */
} EpGroupConfig;

#define EP_MAX_TOP_K 32
#define EP_MAX_ROW_BYTES 65536
#define EP_MAX_RANKS 1024

/*
 * Which GPU is a rank's. A device that is given is taken, and so is that of a borrowed
 * communicator. EP_DEFAULT is the calling thread's current device (cudaSetDevice). Only where
 * nobody has set one is it dealt out: if several ranks see the same GPU as device 0 and the current
 * device of all of them is 0, the first of them takes device 0, the next one device 1, and so on,
 * as far as there are devices. Two ranks with the same GPU cannot have the CUDA backend, unless the
 * setting EP_SHARE_GPUS says yes on all ranks, and each is a process of its own: to find mistakes.
 * Then dealing goes round.
 *
 * Every call runs on the group's device, whatever the thread's current one is, and puts that back,
 * unless it was never used (selecting it would make a context there). Where the device was dealt
 * out, ep_group_create leaves it current on the calling thread, so that memory allocated after that
 * is in the right place. The host backend ignores all of this.
 */

/** num_experts, max_tokens, max_top_k and max_row_bytes are yours to set. */
#define EP_GROUP_CONFIG_INIT                                                            \
    {                                                                                   \
        sizeof(EpGroupConfig), 0, 0, 0, 0, 0, 1, 0, EP_OVERFLOW_ERROR, EP_BACKEND_AUTO, \
            EP_DEFAULT, NULL, EP_DEFAULT, EP_MODE_THROUGHPUT                            \
    }

/**
 * Create a group; collective over the bootstrap. *out is written on success alone. Any rank's
 * failure (bad or differing configuration, no memory) is an error on every rank.
 */
EpStatus ep_group_create(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpGroup **out);

/** Destroy a group and its handles; collective in the sense that peers must have finished their
 *  last call, which each rank waits for, up to the deadline. NULL is allowed. */
void ep_group_destroy(EpGroup *group);

/** What a configuration takes, and whether it can be had. */
typedef struct EpGroupMemory {
    size_t struct_size;
    int32_t feasible;      /**< 1, or 0: `reason` says why not */
    EpBackend backend;     /**< the backend that would serve (HOST or CUDA) */
    int64_t shared_bytes;  /**< per rank: memory that peers reach (staging, flags) */
    int64_t private_bytes; /**< per rank: the rest, handles not included */
    int64_t handle_bytes;  /**< per handle of default EpHandleConfig, on the rank with most experts,
                                latency mode's buffers included; 0 where there is none of these */
    char reason[256];      /**< why not feasible, or why this backend and not the other */
} EpGroupMemory;

#define EP_GROUP_MEMORY_INIT \
    { sizeof(EpGroupMemory), 0, EP_BACKEND_AUTO, 0, 0, 0, "" }

/**
 * Memory of a group of `num_ranks` ranks, without creating or allocating anything; local.
 * A configuration that is merely infeasible is EP_OK with feasible = 0 and a reason. What only
 * several ranks together can know (whether each has a GPU of its own, and of one kind) is found by
 * ep_group_create.
 */
EpStatus ep_group_memory(const EpGroupConfig *config, int32_t num_ranks, EpGroupMemory *out);

/** Facts about a live group. */
typedef struct EpGroupInfo {
    size_t struct_size;
    int32_t rank, size;
    int32_t num_experts;       /**< E */
    int32_t first_expert;      /**< this rank owns first_expert .. + num_local_experts - 1 */
    int32_t num_local_experts; /**< L */
    EpBackend backend;         /**< HOST or CUDA */
    int32_t node, num_nodes;   /**< this rank's node, and how many nodes the group spans */
    int32_t numa_node;         /**< NUMA node of this rank's CPUs, -1 if it spans several */
    int32_t num_cpus;          /**< CPUs this rank may run on */
    int64_t library_bytes;     /**< memory libep holds for this rank: group plus own handles; memory
                                    of section 5 is the caller's */
    int32_t device;            /**< CUDA device of this rank, -1 on the host backend */
    int32_t bound;             /**< 1 if EP_BIND has bound this rank to the CPUs near its GPU */
    char gpu[64];              /**< "NVIDIA H200, 0000:17:00.0"; "" on the host backend */
    char reason[256];          /**< why this backend and not the other */
    EpMode mode;               /**< THROUGHPUT or LATENCY: of handles of default EpHandleConfig */
    int32_t reserved;          /**< 0 */
} EpGroupInfo;

#define EP_GROUP_INFO_INIT                                                                 \
    {                                                                                      \
        sizeof(EpGroupInfo), 0, 0, 0, 0, 0, EP_BACKEND_AUTO, 0, 0, 0, 0, 0, -1, 0, "", "", \
            EP_MODE_AUTO, 0                                                                \
    }

EpStatus ep_group_query(const EpGroup *group, EpGroupInfo *out);

/**
 * Placement: rank `rank` of `num_ranks` owns experts *first .. *first + *count - 1. Blocks are
 * contiguous and in rank order; the first num_experts % num_ranks ranks own one more.
 */
EpStatus ep_expert_range(int32_t num_experts, int32_t num_ranks, int32_t rank, int32_t *first,
                         int32_t *count);

/** How slots lie in the receive buffer. */
typedef enum EpLayout {
    /** [rows, H]: one slot per (token, k). A slab per local expert, in expert order, padded to the
     *  alignment; within a slab by (source rank, token, k). */
    EP_LAYOUT_EXPERT_MAJOR = 1,
    /** [rows, H]: one row per (token, rank) by (source rank, token), not padded. Local expert ids
     *  and weights come as [rows, K], with -1 and 0 for experts that live elsewhere. */
    EP_LAYOUT_FLAT = 2,
    /** [L, rows_per_expert, H]: a slab of fixed size per local expert, filled from its start. */
    EP_LAYOUT_BATCHED = 3
} EpLayout;

/** Flags of ep_max_recv_rows. */
#define EP_ROWS_DUPLICATES 1u /**< a token may name one expert more than once */

/**
 * Worst case of rows that rank `rank` receives in one step, padding included: the max_recv_rows
 * under which nothing can overflow (for BATCHED: the rows_per_expert).
 *
 * With G = num_ranks * max_tokens, L = experts of the rank, A = alignment, M = G * min(K, L) and
 * n = min(L, M), EXPERT_MAJOR gives min(L * ceil(G / A) * A, ceil((M + (A - 1) * n) / A) * A).
 * With EP_ROWS_DUPLICATES one expert may get G * K slots and the rank M = G * K, so both terms
 * grow: min(L * ceil(GK / A) * A, ceil((M + (A - 1) * n) / A) * A). FLAT gives G, and 0 for a rank
 * without experts; BATCHED gives ceil(G / A) * A (ceil(GK / A) * A with duplicates).
 */
EpStatus ep_max_recv_rows(const EpGroupConfig *config, int32_t num_ranks, int32_t rank,
                          EpLayout layout, unsigned flags, int64_t *rows);

/* ---- 5. Memory that peers reach ------------------------------------------------------------ */

/**
 * Rows that lie in memory which the other ranks of the group reach need no staging on a GPU
 * backend: peers write receive rows (recv_tokens, grad_expert_out) to their slots, and expert
 * outputs (expert_out, grad_recv_tokens) are used in place. A tensor may be any part of such
 * memory; tensors elsewhere work as well and give the same bytes. The host backend uses all memory
 * in place, and these calls are there so that one program serves both.
 *
 * All four calls are collective over the group, in the same order on every rank, operations
 * included. They wait for this rank's operations to have finished, and meet the other ranks over
 * the bootstrap: do not call them while a stream is being captured. What is refused on one rank is
 * an error on all, EP_ERR_PEER with that rank's sentence on the others, and nothing has changed on
 * any. Two kinds of ranks take no part, and their peers wait for them up to the deadline: those
 * without a live group (NULL, destroyed, failed), and those that free NULL. A deadline that passes
 * fails the group.
 *
 * A group has at most EP_MAX_WINDOWS such pieces of memory at a time. Destroying it gives back
 * those that are left. They are the caller's: ep_group_query's library_bytes and ep_group_memory
 * do not count them.
 */
#define EP_MAX_WINDOWS 32

/**
 * Allocate `bytes` >= 1 bytes, zeroed, on a multiple of 128, that all ranks of the group reach:
 * device memory on a GPU backend, plain memory on the host backend. Ranks may ask for different
 * sizes; on a GPU backend of several ranks each then takes as much as the largest. *out is written
 * on success alone. Free it with ep_mem_free; it lives no longer than the group.
 *
 * EP_ERR_RANGE (bytes, too many windows), EP_ERR_NO_MEMORY; EP_ERR_UNSUPPORTED where a GPU cannot
 * reach a peer; EP_ERR_ORDER where ranks make different calls.
 */
EpStatus ep_mem_alloc(EpGroup *group, size_t bytes, void **out);

/**
 * Free memory from ep_mem_alloc of this group, once no rank's operations use it any more. NULL is
 * allowed and collective with nobody. EP_ERR_FOREIGN for any other memory, freed memory included;
 * EP_ERR_ORDER where ranks free memory of different calls.
 */
EpStatus ep_mem_free(EpGroup *group, void *memory);

/**
 * Make memory of the caller's reachable by the peers, in place and with its contents: on a GPU
 * backend from ncclMemAlloc or the CUDA driver's virtual memory management, mapped for this rank's
 * GPU (where ranks share GPUs, from cudaMalloc); on the host backend any. It begins on a multiple
 * of 4096, has at least 4096 bytes, as many on every rank (else EP_ERR_MISMATCH), and overlaps no
 * other of the group (else EP_ERR_RANGE). The memory stays the caller's and must outlive its
 * registration.
 */
EpStatus ep_window_register(EpGroup *group, void *memory, size_t bytes);

/** End a registration, once no rank's operations use the memory any more. `memory` is what was
 *  registered; EP_ERR_FOREIGN, EP_ERR_ORDER as with ep_mem_free. */
EpStatus ep_window_deregister(EpGroup *group, void *memory);

/* ---- 6. Handles: one per layer ------------------------------------------------------------- */

/**
 * A handle is one layer, or one micro-batch in flight. It owns the plan that ep_prepare makes of a
 * step's routing and that the four data operations read. Any number may be live, prepared and used
 * in any order (the pipeline F0 F1 B0 F2 B1 B2 needs two). Opaque.
 *
 * All state of a step lives in the handle's memory: one flat block that the library allocates or
 * the caller brings. A caller may save, move and restore the bytes as it likes while no operation
 * is running, and then tells with ep_handle_bind where they are, even if that is where they were.
 */
typedef struct EpHandle EpHandle;

/** Whether dispatch quantises on the way: see ep_dispatch. */
typedef enum EpQuant {
    EP_QUANT_NONE = 1,      /**< rows and scales are carried as they are */
    EP_QUANT_FP8 = 2,       /**< FP8_E4M3 with an FP32 scale for every 128 elements */
    EP_QUANT_FP8_UE8M0 = 3, /**< FP8_E4M3 with a power of two for every 128, UE8M0 in a UINT8 */
    EP_QUANT_MXFP8 = 4      /**< FP8_E4M3 with a power of two for every 32, UE8M0 in a UINT8 */
} EpQuant;

/** How recv_scales lies. */
typedef enum EpScaleOrder {
    EP_SCALES_BY_ROW = 1,   /**< [rows, S]; BATCHED: [L, rows_per_expert, S] */
    EP_SCALES_BY_COLUMN = 2 /**< [S, rows]; BATCHED: [L, S, rows_per_expert]: as grouped GEMMs want
                                 them. The distance of columns is the tensor's number of rows */
} EpScaleOrder;

/** Configuration of a handle; equal on every rank, but for overflow, zero_tail and scale_order,
 *  which each rank may choose. Checked when ep_prepare meets the peers. */
typedef struct EpHandleConfig {
    size_t struct_size;
    EpLayout layout;
    int32_t top_k;           /**< K of every step, or EP_DEFAULT: the group's max_top_k at most */
    int32_t alignment;       /**< power of two, or EP_DEFAULT: the group's */
    int64_t max_recv_rows;   /**< capacity, 0 for exact sizing, or EP_DEFAULT: the group's */
    int64_t rows_per_expert; /**< BATCHED: rows of each slab, > 0. EP_DEFAULT otherwise */
    int32_t overflow;        /**< an EpOverflow, or EP_DEFAULT: the group's */
    int32_t zero_tail;       /**< 1: dispatch and combine_backward also zero the rows past the last
                                  slab (BATCHED: past each slab), as far as the shortest of their
                                  outputs reaches; 0: leave them alone */
    int32_t mode;            /**< an EpMode, or EP_DEFAULT: the group's */
    EpQuant quant;           /**< whether dispatch quantises */
    EpScaleOrder scale_order;
    int32_t reserved; /**< 0 */
} EpHandleConfig;

#define EP_HANDLE_CONFIG_INIT                                                               \
    {                                                                                       \
        sizeof(EpHandleConfig), EP_LAYOUT_EXPERT_MAJOR, EP_DEFAULT, EP_DEFAULT, EP_DEFAULT, \
            EP_DEFAULT, EP_DEFAULT, 0, EP_DEFAULT, EP_QUANT_NONE, EP_SCALES_BY_ROW, 0       \
    }

/** Bytes of memory for its plan that a handle of this configuration takes on this rank: what a
 *  caller may bring. config NULL: defaults. */
EpStatus ep_handle_memory(const EpGroup *group, const EpHandleConfig *config, size_t *bytes);

/** All that a handle takes on this rank. */
typedef struct EpHandleCost {
    size_t struct_size;
    EpMode mode;          /**< THROUGHPUT or LATENCY: what AUTO comes to */
    int32_t reserved;     /**< 0 */
    int64_t plan_bytes;   /**< as ep_handle_memory says: the caller's memory or the library's */
    int64_t buffer_bytes; /**< what it takes besides, always the library's. LATENCY: buffers for
                             rows in flight. THROUGHPUT: 0, but where a handle on the CUDA backend
                               quantises: a step's scales */
} EpHandleCost;

#define EP_HANDLE_COST_INIT \
    { sizeof(EpHandleCost), EP_MODE_AUTO, 0, 0, 0 }

EpStatus ep_handle_cost(const EpGroup *group, const EpHandleConfig *config, EpHandleCost *out);

/**
 * Create a handle. `memory` is the caller's, 64-byte aligned, of at least ep_handle_memory bytes
 * (device or pinned memory on a GPU backend), and must outlive its use; NULL: the library
 * allocates. In throughput mode local, but in the same order on every rank. In latency mode
 * collective, destroying included, since the handle's buffers are memory that peers reach: other
 * ranks may wait for this one. On the CUDA backend creating, binding and destroying a handle copies
 * and waits, in either mode: no stream may be under capture.
 *
 * EP_ERR_UNSUPPORTED: latency mode without a static size; on the CUDA backend, latency mode where
 * max_tokens * max_top_k entries, of two bytes, do not fit into a multiprocessor's shared memory:
 * about 100,000.
 */
EpStatus ep_handle_create(EpGroup *group, const EpHandleConfig *config, void *memory, size_t bytes,
                          EpHandle **out);

/**
 * The caller has moved the bytes of the handle's memory to `memory`, which it owns, or has brought
 * back there, at the address in use, what it had saved: use them. Refused if they are not this
 * handle's (EP_ERR_FOREIGN, EP_ERR_HANDLE_MEMORY); then the old address stays in use. Memory that
 * the library had allocated is freed.
 */
EpStatus ep_handle_bind(EpHandle *handle, void *memory, size_t bytes);

/** Destroy a handle; memory of the caller stays the caller's, marked as no plan. NULL is allowed.
 */
void ep_handle_destroy(EpHandle *handle);

/** What the last ep_prepare of a handle found, on the host. */
typedef struct EpHandleInfo {
    size_t struct_size;
    int64_t step;                 /**< how many plans were made: prepares, or in latency mode
                                       dispatches */
    int64_t num_tokens;           /**< T of this rank */
    int64_t top_k;                /**< K */
    int64_t recv_rows;            /**< rows dispatch fills: the end of the last slab */
    int64_t needed_rows;          /**< rows that it would fill were the capacity unlimited; BATCHED:
                                       the rows_per_expert that would have been enough */
    int64_t dropped_slots;        /**< slots lost to the capacity */
    int64_t remote_rows_sent;     /**< (token, rank) rows that leave this rank */
    int64_t remote_rows_received; /**< (token, rank) rows that reach it from other ranks */
    int64_t local_rows;           /**< (token, rank) rows that stay here */
    int32_t num_local_experts;    /**< L */
    /** Owned by the handle. FLAT rows lie by source; there the three describe how a permutation
     *  by expert would lay out their entries. */
    const int32_t *expert_counts;  /**< [L] slots of each local expert that were kept */
    const int32_t *expert_padded;  /**< [L] rows of each slab, padding included */
    const int32_t *expert_offsets; /**< [L + 1] first row of each slab */
    EpMode mode;                   /**< THROUGHPUT or LATENCY */
    int32_t reserved;              /**< 0 */
} EpHandleInfo;

#define EP_HANDLE_INFO_INIT \
    { sizeof(EpHandleInfo), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, EP_MODE_AUTO, 0 }

/**
 * Read the plan's numbers on the host: after ep_prepare has finished on its stream; in latency mode
 * after ep_dispatch, or ep_dispatch_wait, has. This is how exact sizing learns recv_rows. The
 * arrays are valid until the handle's next prepare or bind; in latency mode, until its next
 * dispatch.
 */
EpStatus ep_handle_info(const EpHandle *handle, EpHandleInfo *out);

/* ---- 7. The five operations ---------------------------------------------------------------- */

/** Optional outputs of ep_prepare; any may be NULL. Types INT32 or INT64. Memory as the backend's
 *  tensors, or pinned host memory on a GPU backend. */
typedef struct EpPlanTensors {
    size_t struct_size;
    const EpTensor *expert_counts;  /**< [L] */
    const EpTensor *expert_padded;  /**< [L] */
    const EpTensor *expert_offsets; /**< [L + 1] */
    const EpTensor *totals;         /**< [3]: recv_rows, needed_rows, dropped_slots */
    const EpTensor *source_counts; /**< [L, R]: slots of each expert that came from each rank; a row
                                        adds up to expert_counts. In slot order the slots of one
                                        source are consecutive, sources ascending */
} EpPlanTensors;

#define EP_PLAN_TENSORS_INIT \
    { sizeof(EpPlanTensors), NULL, NULL, NULL, NULL, NULL }

/**
 * Turn a step's routing into the handle's plan. Everything after it needs no routing work.
 *
 * In latency mode: check the arguments and record where they lie. The plan is made by the
 * ep_dispatch (or ep_dispatch_send) that follows, which reads topk_idx and num_tokens, and `out` is
 * complete when that dispatch is (or ep_dispatch_wait). So their memory stays valid, and the inputs
 * unchanged, until then; the EpTensor structs need not. A dispatch without a new prepare routes
 * again, as the recorded memory says at that time: so graphs are replayed with new routing.
 *
 * topk_idx    [T, K] INT32 or INT64: expert of each entry. Negative: no expert. >= E: treated as
 *             negative and reported by the next ep_group_status. T may differ per rank, 0
 *             included; K must be equal on all ranks. An expert named twice gives two slots.
 * num_tokens  [1] INT32 or INT64, or NULL: only the first num_tokens of the T rows count, so that
 *             buffers of a fixed shape can carry a varying number of tokens. Rows beyond are not
 *             read where they are inputs, and zero where they are outputs. In latency mode all
 *             tensors of tokens have T rows nevertheless.
 * out         see EpPlanTensors; may be NULL.
 */
EpStatus ep_prepare(EpHandle *handle, const EpTensor *topk_idx, const EpTensor *num_tokens,
                    EpStream stream, const EpPlanTensors *out);

/**
 * Move token rows, their weights and their scales to the slots of their experts.
 *
 * tokens             [T, H] any type; rows of 16 .. max_row_bytes bytes, multiple of 16. Where
 *                    ep_prepare took num_tokens, T is at least that number.
 * topk_weights       [T, K] FP32, or NULL
 * scales             [T, S] any type, rows a multiple of 4 bytes up to max_scale_bytes, or NULL
 * recv_tokens        [rows, H] of the tokens' type; rows >= the capacity, or with exact sizing >=
 *                    recv_rows. BATCHED: [L, rows_per_expert, H].
 * recv_topk_weights  [rows] FP32; FLAT: [rows, K]; BATCHED: [L, rows_per_expert]. With
 *                    topk_weights only, then required.
 * recv_scales        [rows, S] (BATCHED: [L, rows_per_expert, S]). With scales only, then required.
 * recv_topk_idx      FLAT only, optional: [rows, K] INT32 or INT64, local expert or -1
 *
 * recv_scales lies as the handle's scale_order says: shapes here are those of EP_SCALES_BY_ROW.
 *
 * Padding rows within slabs become zero: tokens, weights and scales.
 *
 * Where the handle quantises (EpHandleConfig.quant), tokens are BF16, FP16 or FP32 with H a
 * multiple of 16, recv_tokens is FP8_E4M3, `scales` is NULL, and recv_scales is required: with
 * blocks of B = 128 or 32 elements, S = ceil(H / B) FP32 or UINT8 per row. A row is quantised once,
 * by the rank that has the token, so all its slots get the same bytes. For each block, with
 * rounding to nearest even and every operation rounded by itself:
 *
 *     amax    = max(2^-100, largest |x| of the block's finite elements)
 *     scale   = amax / 448                       FP32
 *             = 2^ceil(log2(fl(amax / 448)))     UE8M0: the byte is the exponent + 127
 *     inverse = 448 / amax                       FP32
 *             = 1 / scale                        UE8M0
 *     q       = e4m3(x * inverse)                beyond +-448, infinities included: +-448;
 *                                                NaN: 0x7f
 *
 * so that x is about scale * q. docs/semantics.md says more.
 */
EpStatus ep_dispatch(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                     const EpTensor *scales, EpStream stream, const EpTensor *recv_tokens,
                     const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                     const EpTensor *recv_topk_idx);

/**
 * Bring the experts' outputs back: out[t] = sum over k of w * expert_out[slot(t, k)].
 *
 * expert_out    [rows, H] (BATCHED: [L, rows_per_expert, H]) BF16, FP16 or FP32
 * slot_weights  [rows] FP32 (BATCHED: [L, rows_per_expert]), as dispatch delivered them, or NULL
 *               for w = 1. FLAT: one weight per row.
 * out           [T, H] of the same type. Every one of the T rows is written: exact zero for a
 *               token without live slots.
 *
 * Sums are in FP32 and their order is defined: each expert rank adds its terms in ascending k,
 * acc = fmaf(w, x, acc) from acc = +0 (or acc + x unweighted); a partial sum that travels to
 * another rank is rounded once to the rows' type; the token's rank adds the partial sums in
 * ascending rank from +0, its own unrounded, and rounds once to the type of out. Rounding is to
 * nearest even.
 */
EpStatus ep_combine(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                    EpStream stream, const EpTensor *out);

/**
 * Derivative of ep_dispatch.
 *
 * grad_recv_tokens   [rows, H] (BATCHED: 3-d) BF16, FP16 or FP32
 * grad_slot_weights  gradient of recv_topk_weights, same shape, FP32, or NULL
 * grad_tokens        [T, H]: sum over the token's slots, in the order ep_combine defines
 * grad_topk_weights  [T, K] FP32: gradient of topk_weights; 0 for dead entries. With
 *                    grad_slot_weights only, then required.
 */
EpStatus ep_dispatch_backward(EpHandle *handle, const EpTensor *grad_recv_tokens,
                              const EpTensor *grad_slot_weights, EpStream stream,
                              const EpTensor *grad_tokens, const EpTensor *grad_topk_weights);

/**
 * Derivative of ep_combine.
 *
 * grad_out           [T, H] BF16, FP16 or FP32
 * slot_weights       as in the combine, or NULL where it was unweighted
 * expert_out         as in the combine; needed for grad_slot_weights, else NULL
 * grad_expert_out    like expert_out: w * grad_out[t], rounded once; padding rows zero
 * grad_slot_weights  like slot_weights, FP32: dot(expert_out[slot], grad_out[t]), padding zero;
 *                    or NULL. Deterministic, summed in FP32.
 */
EpStatus ep_combine_backward(EpHandle *handle, const EpTensor *grad_out,
                             const EpTensor *slot_weights, const EpTensor *expert_out,
                             EpStream stream, const EpTensor *grad_expert_out,
                             const EpTensor *grad_slot_weights);

/**
 * The halves of ep_dispatch and ep_combine, in latency mode alone. The first half sends: when it
 * has run, in the stream's order, its inputs may be overwritten. The second receives, and completes
 * the outputs, those of ep_prepare included. In between nothing runs on the caller's behalf, no
 * multiprocessor is held, and the stream is free for other work.
 *
 *     ep_dispatch_send(a, ...)     ep_dispatch_send(b, ...)
 *     ep_dispatch_wait(a, ...)     (experts of a)
 *     ep_combine_send(a, ...)      ep_dispatch_wait(b, ...)     ...
 *
 * Together the two halves do what the whole call does, with the same bytes; arguments are those of
 * the whole call, divided. The first halves are collective, in the same order on every rank, as all
 * operations are; the second halves may come in any order, and different ones on different ranks.
 * On the host backend the first half may wait for the peers', the second one never does; on the
 * CUDA backend it is the other way about, and the second half waits in its kernel.
 *
 * Between the halves the handle can do nothing but the second one: any other operation on it, a
 * second send, ep_handle_bind and ep_handle_info are refused with EP_ERR_ORDER, and so is a wait
 * without its send. Other handles of the group do what they like. Destroying a handle in flight
 * drops what flies.
 */
EpStatus ep_dispatch_send(EpHandle *handle, const EpTensor *tokens, const EpTensor *topk_weights,
                          const EpTensor *scales, EpStream stream);
EpStatus ep_dispatch_wait(EpHandle *handle, EpStream stream, const EpTensor *recv_tokens,
                          const EpTensor *recv_topk_weights, const EpTensor *recv_scales,
                          const EpTensor *recv_topk_idx);
EpStatus ep_combine_send(EpHandle *handle, const EpTensor *expert_out, const EpTensor *slot_weights,
                         EpStream stream);
EpStatus ep_combine_wait(EpHandle *handle, EpStream stream, const EpTensor *out);

/* ---- 8. Status of a group, settings -------------------------------------------------------- */

/** Details of what ep_group_status reports; -1 where a number does not apply. */
typedef struct EpFinding {
    size_t struct_size;
    EpStatus status;  /**< EP_OK: nothing to report */
    int32_t rank;     /**< rank that found it */
    int32_t peer;     /**< rank it concerns */
    int64_t token, k; /**< EP_ERR_ROUTING: the first such entry */
    int64_t expected; /**< EP_ERR_ROUTING: E. EP_ERR_OVERFLOW: the capacity. Waits: the round */
    int64_t seen;   /**< EP_ERR_ROUTING: the index. EP_ERR_OVERFLOW: rows needed. Waits: reached */
    int64_t count;  /**< how many such entries or slots */
    char phase[24]; /**< "prepare", "dispatch", ... */
} EpFinding;

#define EP_FINDING_INIT \
    { sizeof(EpFinding), EP_OK, -1, -1, -1, -1, -1, -1, 0, "" }

/**
 * What went wrong in a group since the last query, without waiting for anything. Routing errors
 * and overflows are reported once, then cleared: they are data. A failed group (a deadline passed,
 * a peer failed, ranks disagreed) stays failed, and every operation on it returns the same status.
 * `out` may be NULL; ep_last_error() has the sentence.
 */
EpStatus ep_group_status(EpGroup *group, EpFinding *out);

/** One setting, read from the environment when a group is created. */
typedef struct EpSetting {
    size_t struct_size;
    const char *name;          /**< "EP_TIMEOUT" */
    const char *type;          /**< "seconds", "bytes", "choice: a|b", "text" */
    const char *default_value; /**< as it would be written */
    const char *value;         /**< in force; valid during the visit */
    const char *doc;           /**< one line */
} EpSetting;

/**
 * Visit every setting. Returns EP_ERR_SETTING, after the visit, if the environment has an EP_ name
 * that is no setting or a value that does not parse: ep_last_error() says which. (Creating a group
 * warns about the former and refuses the latter.) visit may be NULL, to check alone.
 */
EpStatus ep_settings(void (*visit)(const EpSetting *setting, void *context), void *context);

#ifdef __cplusplus
}
#endif

#endif
