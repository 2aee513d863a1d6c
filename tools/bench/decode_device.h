/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_DECODE_DEVICE_H
#define BENCH_DECODE_DEVICE_H

/**
 * The GPU of a rank of --case decode: a process that others do not wait for. Functions return false
 * with a message. Builds without CUDA have none.
 */

#include <stdbool.h>
#include <stddef.h>

#include "ep/ep.h"

typedef struct DecodeDevice DecodeDevice;

/** Select the GPU of a rank, with a stream of its own. */
DecodeDevice *decode_device_open(int rank);
void decode_device_close(DecodeDevice *device);
EpStream decode_device_stream(const DecodeDevice *device);

/** Returns memory that is freed with the device, or NULL. */
void *decode_device_alloc(DecodeDevice *device, size_t bytes);

/** Copy to the GPU, or from it, and wait. */
bool decode_device_copy(DecodeDevice *device, void *to, const void *from, size_t bytes);

/** Capture what `issue` enqueues: from then on decode_device_run replays it. */
bool decode_device_capture(DecodeDevice *device, bool (*issue)(void *context), void *context);

/** Enqueue a step, or replay it, and wait. *us becomes the GPU's time. */
bool decode_device_run(DecodeDevice *device, bool (*issue)(void *context), void *context,
                       double *us);

#endif
