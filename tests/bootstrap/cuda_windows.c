/* SPDX-License-Identifier: Apache-2.0 */
/* The lookup of a tensor's window: arithmetic, in builds with CUDA, without a GPU. */
#if EP_WITH_CUDA

#include "runtime/cuda/cuda.h"
#include "tests/harness/check.h"

static char room[100000];

static EpCudaWindow window_at(size_t offset, int64_t bytes) {
    return (EpCudaWindow){.memory = room + offset, .bytes = bytes};
}

/* Returns the window of [at, at + bytes). Checks that the offset is right, and untouched where
 * there is no window. */
static int find(const EpCuda *cuda, size_t at, int64_t bytes) {
    int64_t offset = -7;
    int which = ep_cuda_window_find(cuda, room + at, bytes, &offset);
    const EpCudaWindow *w = &cuda->windows[which < 0 ? 0 : which];
    int64_t expected = which < 0 ? -7 : w->offset + (int64_t)(room + at - w->memory);
    CHECK(offset == expected, "offset %lld instead of %lld", (long long)offset,
          (long long)expected);
    return which;
}

SoloTest(bootstrap_cuda_windows, tensor_in_a_window) {
    EpCuda cuda = {.num_windows = 4};
    CHECK(find(&cuda, 0, 1) == -1, "there is no window");
    cuda.windows[0] = window_at(40000, 1000);
    cuda.windows[2] = window_at(4096, 8192);
    cuda.windows[3] = window_at(41000, 500); /* adjacent to window 0 */
    static const struct {
        size_t at;
        int64_t bytes;
        int which;
    } cases[] = {{4096, 8192, 2},  {4096, 8193, -1}, {4095, 16, -1},       {4097, 8191, 2},
                 {4097, 8192, -1}, {12287, 1, 2},    {12288, 1, -1},       {40000, 1000, 0},
                 {40999, 1, 0},    {40999, 2, -1},   {41000, 500, 3},      {41499, 2, -1},
                 {0, 100000, -1},  {99999, 1, -1},   {5000, INT64_MAX, -1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        CHECK(find(&cuda, cases[i].at, cases[i].bytes) == cases[i].which, "case %zu: not %d", i,
              cases[i].which);
    int64_t offset = -7;
    CHECK(ep_cuda_window_find(&cuda, NULL, 0, &offset) == -1 && offset == -7, "NULL is in one");
    cuda.num_windows = 3;
    CHECK(find(&cuda, 41000, 500) == -1, "beyond the last window");
}

/* Part of a larger window: peers count from that window's start. */
SoloTest(bootstrap_cuda_windows, tensor_in_an_adopted_window) {
    EpCuda cuda = {.num_windows = EP_WINDOW_NUMBERS};
    int last = EP_WINDOW_NUMBERS - 1;
    cuda.windows[1] = window_at(0, 4096);
    cuda.windows[last] = window_at(50000, 3000);
    cuda.windows[last].offset = (int64_t)1 << 35;
    CHECK(find(&cuda, 50016, 2984) == last, "inside");
    CHECK(find(&cuda, 50016, 2985) == -1, "across the end");
    CHECK(find(&cuda, 100, 200) == 1, "in a window made by all ranks");
}

#endif
