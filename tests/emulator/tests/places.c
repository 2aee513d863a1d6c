/* SPDX-License-Identifier: Apache-2.0 */
/* Windows whose parts other ranks' memory is mapped into: parts keep their addresses when another
 * process takes a place, and what is found counts only once it is adopted. Ranks are threads, and a
 * newcomer is new memory. */
#include "bootstrap/memory/cuda/places.h"
#include "bootstrap/bootstrap.h"
#include "tests/gpu/device_step.h"

enum { BYTES = 3 << 20 }; /* no multiple of what the driver maps */

static void fill(EpCudaPlaces *places, int rank, int value) {
    CHECK_CUDA(cudaMemset(ep_cuda_places_part(places, rank), value, BYTES));
    CHECK_CUDA(cudaDeviceSynchronize());
}

static void check_part(const EpCudaPlaces *places, int rank, int value) {
    const char *part = ep_cuda_places_part(places, rank);
    char first = 0, last = 0;
    CHECK_CUDA(cudaMemcpy(&first, part, 1, cudaMemcpyDefault));
    CHECK_CUDA(cudaMemcpy(&last, part + BYTES - 1, 1, cudaMemcpyDefault));
    CHECK(first == value && last == value, "%d .. %d instead of %d in the part of rank %d", first,
          last, value, rank);
}

/* Let these ranks be newcomers, among those of the group. */
static void set_newcomers(EpGroup *group, uint32_t newcomers, uint32_t members) {
    group->newcomers = group->members = (EpMask){{0}};
    group->newcomers.word[0] = newcomers, group->members.word[0] = members;
    group->call = "ep_group_admit";
}

ThreadTest(gpu_places, replaced, 3) {
    const EpCall call = {"ep_group_admit", bootstrap->rank};
    Case c = case_complete((Case){.ranks = 3});
    EpGroup *group = open_group(bootstrap, &c);
    EpCudaPlaces *places = NULL, *other = NULL;
    int rank = bootstrap->rank;
    EpMask all = ep_mask_of_all(3), second = {{2}};
    REQUIRE_OK(ep_cuda_places_open(group, &call, BYTES, &places));
    check_part(places, rank, 0);
    set_newcomers(group, 7, 7);
    fill(places, rank, 1 + rank);
    REQUIRE_OK(ep_cuda_places_find(group, &call, places));
    CHECK_OK(ep_cuda_places_adopt(group, places, &all));
    for (int r = 0; r < 3; r++)
        check_part(places, r, 1 + r);
    bootstrap->barrier(bootstrap->context, 60);

    /* Another process stands at place 1. */
    if (rank == 1) {
        REQUIRE_OK(ep_cuda_places_open(group, &call, BYTES, &other));
        fill(other, 1, 77);
    }
    EpCudaPlaces *now = rank == 1 ? other : places;
    const char *part = ep_cuda_places_part(places, 1);
    set_newcomers(group, 2, 7);
    for (int i = 0; i < 2; i++) { /* the first time it comes to nothing */
        REQUIRE_OK(ep_cuda_places_find(group, &call, now));
        if (rank != 1) check_part(places, 1, 2);
    }
    bootstrap->barrier(bootstrap->context, 60);
    CHECK_OK(ep_cuda_places_adopt(group, now, rank == 1 ? &all : &second));
    check_part(now, 0, 1), check_part(now, 1, 77), check_part(now, 2, 3);
    CHECK(rank == 1 || part == ep_cuda_places_part(places, 1), "the part has moved");

    /* Stores of the others arrive in it. */
    bootstrap->barrier(bootstrap->context, 60);
    if (rank == 2) fill(now, 1, 99);
    bootstrap->barrier(bootstrap->context, 60);
    check_part(now, 1, 99);

    /* Place 1 is empty. */
    bootstrap->barrier(bootstrap->context, 60);
    set_newcomers(group, 0, 5);
    if (rank != 1) CHECK_OK(ep_cuda_places_adopt(group, places, &second));
    bootstrap->barrier(bootstrap->context, 60);
    if (rank != 1) check_part(places, 2 - rank, 3 - rank);
    bootstrap->barrier(bootstrap->context, 60);
    ep_cuda_places_close(other);
    ep_cuda_places_close(places);
    set_newcomers(group, 0, 7);
    ep_group_destroy(group);
}

/* A rank whose memory cannot be mapped is an error on all, and parts stay as they were. */
ThreadTest(gpu_places, too_little, 2) {
    const EpCall call = {"ep_group_admit", bootstrap->rank};
    Case c = case_complete((Case){.ranks = 2});
    EpGroup *group = open_group(bootstrap, &c);
    EpCudaPlaces *places = NULL;
    EpMask all = ep_mask_of_all(2);
    set_newcomers(group, 3, 3);
    REQUIRE_OK(ep_cuda_places_open(group, &call, bootstrap->rank ? 1 : BYTES, &places));
    EpStatus status = ep_cuda_places_find(group, &call, places);
    if (bootstrap->rank == 0)
        CHECK_REFUSED(status, EP_ERR_SYSTEM, "window: expected CUDA_SUCCESS of cuMemMap");
    else
        CHECK_REFUSED(status, EP_ERR_PEER, "rank 0 was refused");
    CHECK_OK(ep_cuda_places_adopt(group, places, &all)); /* nothing */
    ep_cuda_places_close(places);
    ep_group_destroy(group);
}
