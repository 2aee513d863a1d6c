/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_TUNING_H
#define EP_RUNTIME_CUDA_TUNING_H

/**
 * The constants by which blocks divide the work (blocks.h, latency.h), as a table. A row of the
 * table is for a capability, a number of GPUs and what links them. A file may replace the
 * constants: LIBEP_TUNING names it, and ep_tune writes it. docs/notes/blocks.md has the
 * measurements.
 *
 * Each rank has constants of its own: ranks may divide their blocks differently. Results do not
 * depend on them.
 */

#include "runtime/group.h"

/** What a block takes for a token: for itself, for each row, and for bytes that it moves. */
typedef struct EpCost {
    double token_us, row_us, bytes_per_us;
} EpCost;

/** What a block takes for a token in each of its roles. */
typedef struct EpRoleCosts {
    EpCost send_copies, receive_copies, send_sums, receive_sums;
    double values_us;  /**< more for a token's sum, to store a float for each expert */
    double spare_sums; /**< senders of sums, for each that the wire needs */
} EpRoleCosts;

/** Most tokens that warps claim at once, and items of a pipeline under way: see EpGranularity. */
typedef struct EpFineness {
    double chunk, active;
} EpFineness;

/** Limits of the fraction of blocks that send. */
typedef struct EpSenders {
    double least, most;
} EpSenders;

/** EP_TUNING_MAP describes each of these. */
typedef struct EpTuning {
    double wire_bytes_per_us, memory_bytes_per_us, block_bytes_per_us;
    EpRoleCosts few, many, packing;
    EpCost multiply;
    double item_us, entry_item_us, load, post_us, post_pass_us, least_send_us, crowded, wider;
    double many_blocks, few_spare, many_spare, spare_senders;
    EpSenders copies_sent, factors_sent, sums_sent, alone_sent;
    double alone_small_sent, memory_senders, small_row_bytes;
    double pass_us, token_us, claim_us, own_pass_us, own_claim_us;
    double single, cramped, no_row, busy, most_claimed, several_ranks;
    EpFineness copies, factors, sums;
    double copies_received, factors_received, least_chunk, full_blocks, wanted_stages;
    double latency_dispatch_sent, latency_combine_sent, latency_few_sent, latency_few_terms;
} EpTuning;

/* Constants are measured in these ways:
 *
 *   copy    a plain copy of the same bytes by all GPUs at once, as ep_bench's floors
 *   few     dispatch or combine with 8 to 56 multiprocessors, divided so that one kind of block is
 *           the slower one: its time for a token, fitted over the models of tools/models.txt
 *   many    likewise with 64 multiprocessors to all of them
 *   search  the best of several values, by times of the calls over models and multiprocessors
 */
#define EP_COST_MAP(X, at, token, row, rate, how)                    \
    X(at.token_us, token, 0, 1e3, "us", how ": of the token itself") \
    X(at.row_us, row, 0, 1e3, "us", how ": of each row")             \
    X(at.bytes_per_us, rate, 1, 1e9, "bytes/us", how ": of bytes that move")

/**
 * All constants: X(member, value on H100 and H200, least, most, unit, what it is and how it is
 * measured).
 */
#define EP_TUNING_MAP(X)                                                                        \
    X(wire_bytes_per_us, 350e3, 1, 1e9, "bytes/us", "copy: what a GPU sends to all others")     \
    X(memory_bytes_per_us, 4.3e6, 1, 1e9, "bytes/us", "copy: read and written in own memory")   \
    X(block_bytes_per_us, 80e3, 1, 1e9, "bytes/us", "few: what a block moves, all told")        \
    EP_COST_MAP(X, few.send_copies, 0, 0, 62e3, "few: block sends rows")                        \
    EP_COST_MAP(X, few.receive_copies, .32, .115, 100e3, "few: block copies rows that arrive")  \
    EP_COST_MAP(X, few.send_sums, .17, .355, 220e3, "few: block sends sums")                    \
    EP_COST_MAP(X, few.receive_sums, .4, .03, 190e3, "few: block receives sums")                \
    X(few.spare_sums, 2.5, 1, 100, "ratio", "search: senders of sums, over what the wire uses") \
    EP_COST_MAP(X, many.send_copies, 0, 0, 49e3, "many: block sends rows")                      \
    EP_COST_MAP(X, many.receive_copies, 0, .6, 49e3, "many: block copies rows that arrive")     \
    EP_COST_MAP(X, many.send_sums, 0, .2, 23e3, "many: block sends sums")                       \
    EP_COST_MAP(X, many.receive_sums, .2, 0, 23e3, "many: block receives sums")                 \
    X(many.values_us, .3, 0, 1e3, "us", "many: dispatch_backward's values of a sum")            \
    X(many.spare_sums, 1.2, 1, 100, "ratio", "search: as few.spare_sums")                       \
    EP_COST_MAP(X, packing.send_sums, 0, .87, 96e3, "few: block sends packed sums")             \
    EP_COST_MAP(X, packing.receive_sums, .65, 0, 82e3, "few: block receives packed sums")       \
    X(packing.spare_sums, 2.5, 1, 100, "ratio", "search: as few.spare_sums")                    \
    EP_COST_MAP(X, multiply, .13, .087, 97e3, "few: block multiplies rows")                     \
    X(item_us, 5, 0, 1e3, "us", "many: a sent item's way from memory to a peer")                \
    X(entry_item_us, .83, 0, 1e3, "us", "few: an item of sums by entry, of a block")            \
    X(load, .8, 0, 100, "ratio", "few: a load of a row that is sent, in stores of it")          \
    X(post_us, .2, 0, 1e3, "us", "few: small rows, what a sender takes to post a token")        \
    X(post_pass_us, .45, 0, 1e3, "us", "few: small rows, and for a pass with one row")          \
    X(least_send_us, .33, 0, 1e3, "us", "few: small rows, the least for a token")               \
    X(crowded, 1.2, 0, 100, "ratio", "search: more to post a token where memory is busy")       \
    X(wider, .75, 0, 100, "ratio", "few: more for a row, each time that its lanes double")      \
    X(many_blocks, 64, 2, 4096, "blocks", "search: from here on blocks may count as many")      \
    X(few_spare, 1.48, .01, 100, "ratio", "search: blocks over those needed, up to here few")   \
    X(many_spare, 2, .02, 100, "ratio", "search: from here on many; above few_spare")           \
    X(spare_senders, 1.2, 1, 100, "ratio", "search: senders, over what the wire uses")          \
    X(copies_sent.least, .2, .01, .99, "of blocks", "search: that send rows to be copied")      \
    X(copies_sent.most, .8, .01, .99, "of blocks", "search: likewise")                          \
    X(factors_sent.least, .1, .01, .99, "of blocks", "search: that send rows to be multiplied") \
    X(factors_sent.most, .25, .01, .99, "of blocks", "search: likewise")                        \
    X(sums_sent.least, .42, .01, .99, "of blocks", "search: that send sums")                    \
    X(sums_sent.most, .75, .01, .99, "of blocks", "search: likewise")                           \
    X(alone_sent.least, .5, .01, .99, "of blocks", "search: that send on one GPU")              \
    X(alone_sent.most, .75, .01, .99, "of blocks", "search: likewise")                          \
    X(alone_small_sent, .75, .01, .99, "of blocks", "search: alone_sent.least of small rows")   \
    X(memory_senders, 66, 1, 4096, "blocks", "many: that copy rows at the memory's rate")       \
    X(small_row_bytes, 4096, 16, 1 << 20, "bytes", "many: smaller rows keep blocks busy")       \
    X(pass_us, 2.5, 0, 1e3, "us", "few: a scheduler warp's pass over a row for each team")      \
    X(token_us, .6, 0, 1e3, "us", "few: the least that it takes for a token")                   \
    X(claim_us, 1.5, 0, 1e3, "us", "few: to claim tokens; times by the tokens of a claim")      \
    X(own_pass_us, .85, 0, 1e3, "us", "few: pass_us of a warp that waits for nobody")           \
    X(own_claim_us, .95, 0, 1e3, "us", "few: claim_us of such a warp")                          \
    X(single, .9, 0, 100, "ratio", "search: of one warp's time, for claims of one token")       \
    X(cramped, 1.1, .01, 100, "ratio", "search: of the time there is, a warp lags")             \
    X(no_row, .25, 0, 1, "ratio", "few: of a token's time, without a row for another rank")     \
    X(busy, .9, .01, 100, "ratio", "search: of the time there is, two warps schedule")          \
    X(most_claimed, 380, 1, 1 << 20, "tokens", "search: claimed by all blocks together")        \
    X(several_ranks, 2, .01, 1024, "ranks", "search: of a token, two warps schedule")           \
    X(copies.chunk, 2, 1, 4, "tokens", "search: claimed at once, of 16 KiB, by all blocks")     \
    X(copies.active, 4, 1, 20, "items", "search: sent at a time, likewise")                     \
    X(factors.chunk, 1, 1, 4, "tokens", "search: as copies.chunk, of rows to be multiplied")    \
    X(factors.active, 8, 1, 20, "items", "search: as copies.active, likewise")                  \
    X(sums.chunk, 1, 1, 4, "tokens", "search: as copies.chunk, of sums")                        \
    X(sums.active, 6, 1, 20, "items", "search: as copies.active, of sums")                      \
    X(copies_received, 8, 1, 20, "items", "search: received at a time")                         \
    X(factors_received, 4, 1, 20, "items", "search: likewise, of rows to be multiplied")        \
    X(least_chunk, 2, 1, 4, "tokens", "search: of sums, of all scheduler warps")                \
    X(full_blocks, 132, 2, 4096, "blocks", "the blocks that the six above were found with")     \
    X(wanted_stages, 6, 2, 40, "stages", "search: so that loads overlap with stores")           \
    X(latency_dispatch_sent, .4, .01, .99, "of blocks", "search: latency mode, that send")      \
    X(latency_combine_sent, .5, .01, .99, "of blocks", "search: likewise, of sums")             \
    X(latency_few_sent, .38, .01, .99, "of blocks", "search: likewise, of few terms each")      \
    X(latency_few_terms, 3, 0, 1024, "experts/rank", "search: fewer of a token are few terms")

/** What links the GPUs of a node. */
typedef enum EpTuningLinks { EP_LINKS_NONE, EP_LINKS_NVLINK, EP_LINKS_PEER } EpTuningLinks;

/** What a table is for. */
typedef struct EpTuningKey {
    char gpu[40];        /**< name of the GPU, as the driver says */
    int32_t capability;  /**< 90 is 9.0 */
    int32_t gpus;        /**< ranks of this one's node */
    EpTuningLinks links; /**< NONE: one GPU */
} EpTuningKey;

#define EP_TUNING_VERSION 1 /* of the file: changes with the meaning of its constants */

/** What is known of H100 and H200: the values of EP_TUNING_MAP. */
extern const EpTuning ep_tuning_hopper;

/** Returns the row for this key. *known becomes 0 if the row is a guess. */
const EpTuning *ep_tuning_find(const EpTuningKey *key, int *known);

/**
 * Read a file over the constants in *out: those that it does not name stay. *fits becomes 0, and
 * *out stays, if it is for another number of GPUs or for other links than `key`. EP_ERR_SETTING for
 * a file that is missing, cut short, of another version or GPU, or malformed, with *out as it was.
 */
EpStatus ep_tuning_read(const char *path, const EpTuningKey *key, EpTuning *out, int *fits);

/** Write a file's text. Returns its length, as snprintf does. */
size_t ep_tuning_write(const EpTuning *tuning, const EpTuningKey *key, char *text, size_t bytes);

/** The constants of a group, and where they come from. */
typedef struct EpTuned {
    EpTuning constants;
    EpTuningKey key;
    char source[128]; /**< for EpGroupInfo.tuning */
} EpTuned;

/** Choose the constants of a group whose links are known, by LIBEP_TUNING or from the table. */
EpStatus ep_tuning_open(const EpGroup *group, EpTuningLinks links, EpTuned *out);

#endif
