/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_CUDA_H
#define EMULATOR_CUDA_H

/** As much of CUDA's driver interface as libep uses. */

typedef enum CUresult { CUDA_SUCCESS = 0 } CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;

#endif
