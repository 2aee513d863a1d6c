/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_CUDA_H
#define EMULATOR_CUDA_H

/** The part of CUDA's driver interface that libep uses. */

typedef enum CUresult { CUDA_SUCCESS = 0 } CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;

#endif
