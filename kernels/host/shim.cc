// Hosts compiled TVM kernels as ONNX Runtime custom operators.
//
// One custom operator per operator name; the node's attribute `variant` picks the kernel. Whatever
// goes wrong is returned as a status, so the run fails with its reason; nothing is printed and no
// exception exists (built with -fno-exceptions, and without the C++ library: see build.py).
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "ort_abi.h"
#include "table.h"
#include "tvm_abi.h"

#define SUBQUAD_RETURN_IF_ERROR(call)          \
  do {                                         \
    if (OrtStatus* status_ = (call)) return status_; \
  } while (0)

namespace subquad {
namespace {

constexpr size_t kTextSize = 1024;
constexpr size_t kAlignment = 64;  // what TVM expects of a workspace
// More tasks than threads: a task takes the next index when it is done, so unequal ones even out.
constexpr int kTasksPerCore = 16;
// Of inputs and outputs: a call on fewer bytes is over before another thread has woken up.
constexpr size_t kParallelBytes = size_t{128} << 10;

// State of the call this thread works on. Trivial types only: no destructor at thread exit.
thread_local OrtApi t_api = nullptr;
thread_local const OrtKernelContext* t_context = nullptr;  // null: loops run serially
thread_local bool t_in_parallel = false;
thread_local char t_error[kTextSize];

OrtStatus* Fail(OrtApi api, OrtErrorCode code, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

OrtStatus* Fail(OrtApi api, OrtErrorCode code, const char* format, ...) {
  char text[2 * kTextSize];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return ort::CreateStatus::Call(api, code, text);
}

// What TVM kernels call.

struct Launch {
  FTVMParallelLambda body;
  void* closure;
  TVMParallelGroupEnv environment;
  std::atomic<bool> failed;
  char error[kTextSize];
};

void RunTask(void* user_data, size_t index) {
  auto* launch = static_cast<Launch*>(user_data);
  if (launch->failed.load(std::memory_order_relaxed)) return;
  const bool outer = t_in_parallel;
  t_in_parallel = true;
  t_error[0] = '\0';
  const int code = launch->body(static_cast<int>(index), &launch->environment, launch->closure);
  t_in_parallel = outer;
  if (code != 0 && !launch->failed.exchange(true)) {
    memcpy(launch->error, t_error, kTextSize);
  }
}

int NumTasks() {
  static std::atomic<int> known{0};
  int tasks = known.load(std::memory_order_relaxed);
  if (tasks == 0) {
    cpu_set_t cores;
    const bool counted = sched_getaffinity(0, sizeof cores, &cores) == 0;
    tasks = kTasksPerCore * (counted ? CPU_COUNT(&cores) : 64);
    known.store(tasks, std::memory_order_relaxed);
  }
  return tasks;
}

int ParallelLaunch(FTVMParallelLambda body, void* closure, int num_task) {
  if (t_in_parallel || t_context == nullptr) {
    TVMParallelGroupEnv alone{nullptr, 1};
    return body(0, &alone, closure);
  }
  Launch launch;
  launch.body = body;
  launch.closure = closure;
  launch.environment = {nullptr, num_task > 0 ? num_task : NumTasks()};
  launch.failed.store(false);
  launch.error[0] = '\0';
  OrtStatus* status = ort::KernelContext_ParallelFor::Call(
      t_api, t_context, RunTask, static_cast<size_t>(launch.environment.num_task), 0, &launch);
  if (status != nullptr) {
    ort::ReleaseStatus::Call(t_api, status);
    snprintf(t_error, kTextSize, "the thread pool refused the work");
    return -1;
  }
  if (!launch.failed.load()) return 0;
  memcpy(t_error, launch.error, kTextSize);
  return -1;
}

// Workspaces. A task of a short sequence takes about as long as allocating a dozen of them from the
// system, so every thread keeps a stack for small ones. Kernels free in reverse order; where one
// does not, its space comes back when the stack is empty.

constexpr size_t kStackLimit = size_t{1} << 20;  // bytes a thread keeps

// Before every workspace.
struct alignas(kAlignment) Header {
  size_t size;  // with the header
  bool on_stack;
};

struct Stack {
  char* memory;
  size_t capacity;
  size_t top;
  size_t blocks;   // in use
  size_t missing;  // bytes in use that did not fit
  size_t wanted;   // capacity that would have sufficed
};

thread_local Stack t_stack;

// Asked for once per call: in a shared library every access to a thread's variable is a call.
Stack* ThisStack() {
  Stack* stack = &t_stack;
  asm volatile("" : "+r"(stack));
  return stack;
}

pthread_key_t stack_key;
bool has_stack_key = false;  // without one a thread could not free its stack

void* SystemBlock(size_t size) {
  void* block = nullptr;
  return posix_memalign(&block, kAlignment, size) == 0 ? block : nullptr;
}

// With nothing in use: as much as was needed until now.
void Grow(Stack* stack) {
  const size_t capacity = stack->wanted < kStackLimit ? stack->wanted : kStackLimit;
  if (capacity <= stack->capacity || !has_stack_key) return;
  free(stack->memory);
  stack->memory = static_cast<char*>(SystemBlock(capacity));
  stack->capacity = stack->memory == nullptr ? 0 : capacity;
  // Its destructor frees it when the thread ends.
  if (pthread_setspecific(stack_key, stack->memory) != 0) {
    free(stack->memory);
    *stack = {};
  }
}

void* AllocWorkspace(int, int, uint64_t size, int, int) {
  Stack* stack = ThisStack();
  const size_t whole = sizeof(Header) + (size + kAlignment - 1) / kAlignment * kAlignment;
  if (stack->blocks == 0 && stack->wanted > stack->capacity) Grow(stack);
  const bool fits = whole <= stack->capacity - stack->top;
  auto* header = static_cast<Header*>(fits ? stack->memory + stack->top : SystemBlock(whole));
  if (header == nullptr) {
    snprintf(t_error, kTextSize, "out of memory: a workspace of %llu bytes",
             static_cast<unsigned long long>(size));
    return nullptr;
  }
  *header = {whole, fits};
  ++stack->blocks;
  (fits ? stack->top : stack->missing) += whole;
  if (stack->top + stack->missing > stack->wanted) stack->wanted = stack->top + stack->missing;
  return header + 1;
}

int FreeWorkspace(int, int, void* block) {
  Stack* stack = ThisStack();
  Header* header = static_cast<Header*>(block) - 1;
  if (!header->on_stack) {
    stack->missing -= header->size;
    free(header);
  } else if (reinterpret_cast<char*>(header) + header->size == stack->memory + stack->top) {
    stack->top -= header->size;
  }
  if (--stack->blocks == 0) stack->top = 0;
  return 0;
}

void ConnectKernels() {
  if (&__TVMBackendParallelLaunch != nullptr) {
    __TVMBackendParallelLaunch = reinterpret_cast<void*>(ParallelLaunch);
  }
  if (&__TVMBackendAllocWorkspace != nullptr) {
    __TVMBackendAllocWorkspace = reinterpret_cast<void*>(AllocWorkspace);
  }
  if (&__TVMBackendFreeWorkspace != nullptr) {
    __TVMBackendFreeWorkspace = reinterpret_cast<void*>(FreeWorkspace);
  }
}

// One node.

struct Kernel {
  OrtApi api;
  const Operator* op;
  const KernelEntry* entry;
  bool poison;  // fill outputs with NaN before the kernel runs
};

struct CustomOp : OrtCustomOp {
  const Operator* op;
};

// A tensor as TVM sees it, and a copy of its data where they were not aligned to their elements.
struct Argument {
  DLTensor tensor;
  int64_t shape[kMaxRank];
  int64_t strides[kMaxRank];
  void* copy;
};

struct Arguments {
  Argument items[kMaxInputs + kMaxOutputs];
  size_t count = 0;
  ~Arguments() {
    for (size_t i = 0; i < count; ++i) free(items[i].copy);
  }
};

DLDataType DataType(OrtElementType type) {
  switch (type) {
    case ORT_INT32:
      return {kDLInt, 32, 1};
    case ORT_INT64:
      return {kDLInt, 64, 1};
    case ORT_BOOL:
      return {kDLBool, 8, 1};
    default:
      return {kDLFloat, 32, 1};
  }
}

void Describe(Argument* argument, void* data, OrtElementType type, size_t rank) {
  int64_t stride = 1;
  for (size_t axis = rank; axis-- > 0;) {
    argument->strides[axis] = stride;
    stride *= argument->shape[axis];
  }
  argument->copy = nullptr;
  argument->tensor = {data,           {kDLCPU, 0},       static_cast<int32_t>(rank), DataType(type),
                      argument->shape, argument->strides, 0};
}

size_t NumBytes(const Argument& argument) {
  size_t size = argument.tensor.dtype.bits / 8;
  for (int32_t axis = 0; axis < argument.tensor.ndim; ++axis) size *= argument.shape[axis];
  return size;
}

OrtStatus* ReadShape(const Kernel& kernel, const Input& input, const OrtValue* value,
                     int64_t* shape) {
  OrtElementType type = ORT_FLOAT;
  const int64_t* dimensions = nullptr;
  size_t rank = 0;
  SUBQUAD_RETURN_IF_ERROR(ort::GetTensorElementTypeAndShapeDataReference::Call(
      kernel.api, value, &type, &dimensions, &rank));
  const size_t wanted = static_cast<size_t>(input.rank);
  if (type != input.type || rank != wanted) {
    return Fail(kernel.api, ORT_INVALID_ARGUMENT,
                "%s: input %s must have element type %d and %zu dimensions, got %d and %zu",
                kernel.entry->variant, input.name, input.type, wanted, type, rank);
  }
  for (size_t axis = 0; axis < rank; ++axis) {
    shape[axis] = dimensions[axis];
    if (shape[axis] <= 0) {
      return Fail(kernel.api, ORT_INVALID_ARGUMENT,
                  "%s: input %s is empty: axis %zu has size %lld; batch and lengths must be at "
                  "least 1",
                  kernel.entry->variant, input.name, axis, static_cast<long long>(shape[axis]));
    }
  }
  return nullptr;
}

OrtStatus* Align(const Kernel& kernel, Argument* argument) {
  const size_t element = argument->tensor.dtype.bits / 8;
  if (reinterpret_cast<uintptr_t>(argument->tensor.data) % element == 0) return nullptr;
  const size_t size = NumBytes(*argument);
  if (posix_memalign(&argument->copy, kAlignment, size) != 0) {
    argument->copy = nullptr;
    return Fail(kernel.api, ORT_FAIL, "out of memory: an aligned copy of %zu bytes", size);
  }
  memcpy(argument->copy, argument->tensor.data, size);
  argument->tensor.data = argument->copy;
  return nullptr;
}

OrtStatus* ReadInputs(const Kernel& kernel, const OrtKernelContext* context,
                      Arguments* arguments) {
  size_t given = 0;
  SUBQUAD_RETURN_IF_ERROR(ort::KernelContext_GetInputCount::Call(kernel.api, context, &given));
  for (size_t i = 0; i < kernel.op->num_inputs; ++i) {
    const Input& input = kernel.op->inputs[i];
    const OrtValue* value = nullptr;
    if (i < given) {
      SUBQUAD_RETURN_IF_ERROR(
          ort::KernelContext_GetInput::Call(kernel.api, context, i, &value));
    }
    const bool wanted = (kernel.entry->inputs >> i & 1) != 0;
    if ((value != nullptr) != wanted) {
      return Fail(kernel.api, ORT_INVALID_ARGUMENT, "%s: input %s is %s, but the variant has %s",
                  kernel.entry->variant, input.name, wanted ? "absent" : "given",
                  wanted ? "one" : "none");
    }
    if (!wanted) continue;
    Argument* argument = &arguments->items[arguments->count];
    SUBQUAD_RETURN_IF_ERROR(ReadShape(kernel, input, value, argument->shape));
    void* data = nullptr;
    // The C interface has no read-only access; kernels never write to inputs.
    SUBQUAD_RETURN_IF_ERROR(
        ort::GetTensorMutableData::Call(kernel.api, const_cast<OrtValue*>(value), &data));
    Describe(argument, data, input.type, static_cast<size_t>(input.rank));
    ++arguments->count;
    SUBQUAD_RETURN_IF_ERROR(Align(kernel, argument));
  }
  return nullptr;
}

OrtStatus* MakeOutput(const Kernel& kernel, OrtKernelContext* context, size_t number,
                      Arguments* arguments) {
  const OutputShape& wanted = kernel.entry->outputs[number];
  const OrtElementType type = kernel.op->outputs[number].type;
  Argument* argument = &arguments->items[arguments->count];
  for (int32_t axis = 0; axis < wanted.rank; ++axis) {
    const Dimension& dimension = wanted.dimensions[axis];
    const int64_t divisor = dimension.divisor;
    argument->shape[axis] =
        dimension.argument < 0
            ? divisor
            : (arguments->items[dimension.argument].shape[dimension.axis] + divisor - 1) / divisor;
  }
  const size_t rank = static_cast<size_t>(wanted.rank);
  OrtValue* value = nullptr;
  SUBQUAD_RETURN_IF_ERROR(ort::KernelContext_GetOutput::Call(kernel.api, context, number,
                                                             argument->shape, rank, &value));
  if (value == nullptr) {
    return Fail(kernel.api, ORT_INVALID_ARGUMENT, "%s: output %zu is not used, but the variant "
                "has one", kernel.entry->variant, number);
  }
  void* data = nullptr;
  SUBQUAD_RETURN_IF_ERROR(ort::GetTensorMutableData::Call(kernel.api, value, &data));
  Describe(argument, data, type, rank);
  ++arguments->count;
  if (kernel.poison) memset(data, 0xff, NumBytes(*argument));  // all bits set: a NaN
  return nullptr;
}

OrtStatus* Compute(void* state, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(state);
  Arguments arguments;
  SUBQUAD_RETURN_IF_ERROR(ReadInputs(kernel, context, &arguments));
  for (size_t i = 0; i < kernel.entry->num_outputs; ++i) {
    SUBQUAD_RETURN_IF_ERROR(MakeOutput(kernel, context, i, &arguments));
  }
  TVMFFIAny packed[kMaxInputs + kMaxOutputs];
  size_t bytes = 0;
  for (size_t i = 0; i < arguments.count; ++i) {
    bytes += NumBytes(arguments.items[i]);
    packed[i] = {};
    packed[i].type_index = kTVMFFIDLTensorPtr;
    packed[i].v_ptr = &arguments.items[i].tensor;
  }
  TVMFFIAny result{};
  result.type_index = kTVMFFINone;
  const OrtApi outer_api = t_api;
  const OrtKernelContext* outer_context = t_context;
  t_api = kernel.api;
  t_context = bytes < kParallelBytes ? nullptr : context;
  t_error[0] = '\0';
  const int code =
      kernel.entry->run(nullptr, packed, static_cast<int32_t>(arguments.count), &result);
  t_api = outer_api;
  t_context = outer_context;
  if (code == 0) return nullptr;
  return Fail(kernel.api, ORT_FAIL, "kernel %s failed: %s", kernel.entry->variant,
              t_error[0] != '\0' ? t_error : "it gave no reason");
}

OrtStatus* ReadVariant(OrtApi api, const Operator& op, const OrtKernelInfo* info, char** text) {
  constexpr const char* kAttribute = "variant";
  size_t size = 0;
  OrtStatus* status =
      ort::KernelInfoGetAttribute_string::Call(api, info, kAttribute, nullptr, &size);
  if (status != nullptr) {
    ort::ReleaseStatus::Call(api, status);
    return Fail(api, ORT_INVALID_ARGUMENT,
                "%s::%s: the node has no attribute '%s', by which kernels are chosen; convert again",
                kDomain, op.name, kAttribute);
  }
  *text = static_cast<char*>(malloc(size + 1));
  if (*text == nullptr) return Fail(api, ORT_FAIL, "out of memory");
  (*text)[size] = '\0';
  return ort::KernelInfoGetAttribute_string::Call(api, info, kAttribute, *text, &size);
}

OrtStatus* CreateKernel(const OrtCustomOp* self, OrtApi api, const OrtKernelInfo* info,
                        void** state) {
  const Operator& op = *static_cast<const CustomOp*>(self)->op;
  char* variant = nullptr;
  OrtStatus* status = ReadVariant(api, op, info, &variant);
  const KernelEntry* found = nullptr;
  for (size_t i = 0; status == nullptr && i < op.num_kernels && found == nullptr; ++i) {
    if (strcmp(op.kernels[i].variant, variant) == 0) found = &op.kernels[i];
  }
  if (status == nullptr && found == nullptr) {
    status = Fail(api, ORT_NOT_IMPLEMENTED,
                  "%s::%s: this library (%s) has no kernel for variant '%s'; it belongs to another "
                  "model. Use the library beside the model",
                  kDomain, op.name, kTarget, variant);
  }
  free(variant);
  SUBQUAD_RETURN_IF_ERROR(status);
  auto* kernel = static_cast<Kernel*>(malloc(sizeof(Kernel)));
  if (kernel == nullptr) return Fail(api, ORT_FAIL, "out of memory");
  const char* poison = getenv("SUBQUAD_POISON");
  *kernel = {api, &op, found, poison != nullptr && strcmp(poison, "1") == 0};
  *state = kernel;
  return nullptr;
}

const Operator& OperatorOf(const OrtCustomOp* self) {
  return *static_cast<const CustomOp*>(self)->op;
}

void Fill(CustomOp* custom, const Operator* op) {
  memset(custom, 0, sizeof *custom);
  custom->op = op;
  custom->version = SUBQUAD_ORT_CUSTOM_OP_VERSION;
  custom->GetName = [](const OrtCustomOp* self) { return OperatorOf(self).name; };
  custom->GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  custom->GetInputTypeCount = [](const OrtCustomOp* self) { return OperatorOf(self).num_inputs; };
  custom->GetInputType = [](const OrtCustomOp* self, size_t i) {
    return OperatorOf(self).inputs[i].type;
  };
  custom->GetInputCharacteristic = [](const OrtCustomOp* self, size_t i) {
    return OperatorOf(self).inputs[i].optional ? ORT_OPTIONAL : ORT_REQUIRED;
  };
  custom->GetInputMemoryType = [](const OrtCustomOp*, size_t) { return ORT_MEM_DEFAULT; };
  custom->GetOutputTypeCount = [](const OrtCustomOp* self) {
    return OperatorOf(self).num_outputs;
  };
  custom->GetOutputType = [](const OrtCustomOp* self, size_t i) {
    return OperatorOf(self).outputs[i].type;
  };
  custom->GetOutputCharacteristic = [](const OrtCustomOp* self, size_t i) {
    return OperatorOf(self).outputs[i].optional ? ORT_OPTIONAL : ORT_REQUIRED;
  };
  custom->CreateKernelV2 = CreateKernel;
  custom->KernelComputeV2 = Compute;
  custom->KernelDestroy = [](void* state) { free(state); };
}

// Registration.

constexpr size_t kMaxOperators = 16;

// One domain for all sessions of the process; ONNX Runtime only refers to it, so it is never freed.
OrtStatus* Domain(OrtApi api, OrtCustomOpDomain** domain) {
  static std::atomic_flag busy = ATOMIC_FLAG_INIT;
  static OrtCustomOpDomain* shared = nullptr;
  static CustomOp operators[kMaxOperators];
  while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
  OrtStatus* status = nullptr;
  if (shared == nullptr) {
    ConnectKernels();
    has_stack_key = pthread_key_create(&stack_key, free) == 0;
    OrtCustomOpDomain* made = nullptr;
    status = ort::CreateCustomOpDomain::Call(api, kDomain, &made);
    for (size_t i = 0; status == nullptr && i < kNumOperators; ++i) {
      Fill(&operators[i], &kOperators[i]);
      status = ort::CustomOpDomain_Add::Call(api, made, &operators[i]);
    }
    if (status == nullptr) shared = made;
  }
  *domain = shared;
  busy.clear(std::memory_order_release);
  return status;
}

bool OldRuntime(const char* version) {
  char* end = nullptr;
  const long major = strtol(version, &end, 10);
  const long minor = *end == '.' ? strtol(end + 1, nullptr, 10) : -1;
  if (major != SUBQUAD_ORT_MAJOR) return major < SUBQUAD_ORT_MAJOR;
  return minor < SUBQUAD_ORT_MINOR;
}

// The reason of the failure, as TVM gives it: a kind and the pieces of a message.
void SetError(const char* kind, const char* const* parts, int32_t num_parts) {
  size_t length = 0;
  const auto append = [&length](const char* text) {
    for (; text != nullptr && *text != '\0' && length + 1 < kTextSize; ++text) {
      t_error[length++] = *text;
    }
  };
  append(kind);
  append(": ");
  for (int32_t i = 0; i < num_parts; ++i) append(parts[i]);
  t_error[length] = '\0';
}

}  // namespace
}  // namespace subquad

extern "C" {

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) {
  subquad::SetError(kind, &message, 1);
}

void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t num_parts) {
  subquad::SetError(kind, parts, num_parts);
}

// Entry point, called by SessionOptions.register_custom_ops_library and its like.
__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                    const OrtApiBase* base) {
  using namespace subquad;
  const char* version = base->GetVersionString();
  OrtApi api = base->GetApi(SUBQUAD_ORT_API_VERSION);
  if (api == nullptr || OldRuntime(version)) {
    // The first version of the table holds what it takes to say so; every release serves it.
    return Fail(api != nullptr ? api : base->GetApi(1), ORT_FAIL,
                "subquad kernels need ONNX Runtime %d.%d or newer, this is %s", SUBQUAD_ORT_MAJOR,
                SUBQUAD_ORT_MINOR, version);
  }
  if (const char* missing = MissingExtension()) {
    return Fail(api, ORT_FAIL,
                "subquad kernels for %s cannot run here: this processor has no %s", kTarget,
                missing);
  }
  OrtCustomOpDomain* domain = nullptr;
  SUBQUAD_RETURN_IF_ERROR(Domain(api, &domain));
  return ort::AddCustomOpDomain::Call(api, options, domain);
}

}  // extern "C"
