// What a compiled TVM kernel (apache-tvm 0.27, apache-tvm-ffi 0.1.14) takes and needs.
//
// Layouts are those of DLPack 1.x and of the public headers tvm/ffi/c_api.h and
// tvm/runtime/c_backend_api.h; they are repeated here so that building needs no TVM headers.
#ifndef SUBQUAD_TVM_ABI_H_
#define SUBQUAD_TVM_ABI_H_

#include <stdint.h>

extern "C" {

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct TVMFFIAny {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t v_int64;
    double v_float64;
    void* v_ptr;
  };
};

enum { kDLCPU = 1 };
enum { kDLInt = 0, kDLFloat = 2, kDLBool = 6 };
enum { kTVMFFINone = 0, kTVMFFIDLTensorPtr = 7 };

// A kernel: the symbol __tvm_ffi_<global_symbol>. Not 0: failed, the error was raised (below).
typedef int (*TvmKernel)(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result);

struct TVMParallelGroupEnv {
  void* sync_handle;  // for barriers, which templates must not use
  int32_t num_task;
};
typedef int (*FTVMParallelLambda)(int task_id, TVMParallelGroupEnv* env, void* closure);

// Variables in the kernel objects, one for the whole library after linking; the host sets them.
// Weak: a library whose kernels need none of them has no such variable.
extern __attribute__((weak)) void* __TVMBackendParallelLaunch;
extern __attribute__((weak)) void* __TVMBackendAllocWorkspace;
extern __attribute__((weak)) void* __TVMBackendFreeWorkspace;

// Functions the kernel objects call; the host defines them.
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t num_parts);

}  // extern "C"

#endif  // SUBQUAD_TVM_ABI_H_
