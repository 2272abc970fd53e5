// The part of ONNX Runtime's public C interface that the kernel library uses.
//
// The interface is a table of function pointers that only ever grows: an entry keeps its place and
// meaning in every later release. So the entries used here are named by their place, and a library
// built once works with every release from SUBQUAD_ORT_MAJOR.SUBQUAD_ORT_MINOR on. RegisterCustomOps
// (shim.cc) checks the release it is loaded into before it touches the table.
#ifndef SUBQUAD_ORT_ABI_H_
#define SUBQUAD_ORT_ABI_H_

#include <stddef.h>
#include <stdint.h>

// Oldest release that is tested; `onnxruntime>=` in pyproject.toml is the same.
#define SUBQUAD_ORT_MAJOR 1
#define SUBQUAD_ORT_MINOR 27

// Version of the table that is asked for: the first that has all entries used here. Newer releases
// serve it.
#define SUBQUAD_ORT_API_VERSION 24
// Version of OrtCustomOp below.
#define SUBQUAD_ORT_CUSTOM_OP_VERSION 18

extern "C" {

struct OrtStatus;  // null = success
struct OrtSessionOptions;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtCustomOpDomain;
struct OrtShapeInferContext;
struct OrtCustomOp;

typedef void (*OrtEntry)(void);
typedef const OrtEntry* OrtApi;

struct OrtApiBase {
  OrtApi (*GetApi)(uint32_t version);  // null: this release has no such version
  const char* (*GetVersionString)(void);
};

enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_NOT_IMPLEMENTED = 9 };
enum OrtElementType { ORT_FLOAT = 1, ORT_INT32 = 6, ORT_INT64 = 7, ORT_BOOL = 9 };
enum OrtCharacteristic { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };
enum OrtMemType { ORT_MEM_DEFAULT = 0 };

typedef void (*OrtParallelBody)(void* user_data, size_t index);

// An operator as the library describes it, version 18; ONNX Runtime reads no field that came later.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, OrtApi, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  // The V2 callbacks return a status and replace CreateKernel and KernelCompute.
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, OrtApi, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** input_index, int** output_index);
  void (*ReleaseMayInplace)(int* input_index, int* output_index);
  size_t (*GetAliasMap)(int** input_index, int** output_index);
  void (*ReleaseAliasMap)(int* input_index, int* output_index);
};

}  // extern "C"

// Table entries: the place, and the C signature.
namespace ort {

template <int kPlace, typename Signature>
struct Entry;

template <int kPlace, typename Result, typename... Args>
struct Entry<kPlace, Result(Args...)> {
  static Result Call(OrtApi api, Args... args) {
    return reinterpret_cast<Result (*)(Args...)>(api[kPlace])(args...);
  }
};

using CreateStatus = Entry<0, OrtStatus*(OrtErrorCode, const char*)>;
using CreateCustomOpDomain = Entry<26, OrtStatus*(const char*, OrtCustomOpDomain**)>;
using CustomOpDomain_Add = Entry<27, OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)>;
using AddCustomOpDomain = Entry<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>;
using GetTensorMutableData = Entry<51, OrtStatus*(OrtValue*, void**)>;
// Copies at most *size bytes and sets *size to the full length, the final zero included.
using KernelInfoGetAttribute_string =
    Entry<87, OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>;
using KernelContext_GetInputCount = Entry<88, OrtStatus*(const OrtKernelContext*, size_t*)>;
// Null value: the optional input is absent.
using KernelContext_GetInput =
    Entry<90, OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>;
using KernelContext_GetOutput =
    Entry<91, OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>;
using ReleaseStatus = Entry<93, void(OrtStatus*)>;
// Runs body(user_data, 0 .. total-1) on the session's intra-op threads; num_batch 0: each thread
// takes the next index when it is free.
using KernelContext_ParallelFor =
    Entry<274, OrtStatus*(const OrtKernelContext*, OrtParallelBody, size_t, size_t, void*)>;
// The shape stays the tensor's: nothing is allocated, unlike by the older entries for it.
using GetTensorElementTypeAndShapeDataReference =
    Entry<414, OrtStatus*(const OrtValue*, OrtElementType*, const int64_t**, size_t*)>;

}  // namespace ort

#endif  // SUBQUAD_ORT_ABI_H_
