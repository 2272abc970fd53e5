// What the generated source of one library (build.py) tells the shim.
#ifndef SUBQUAD_TABLE_H_
#define SUBQUAD_TABLE_H_

#include "ort_abi.h"
#include "tvm_abi.h"

namespace subquad {

constexpr size_t kMaxInputs = 24;
constexpr size_t kMaxOutputs = 8;
constexpr size_t kMaxRank = 6;

struct Input {
  const char* name;
  OrtElementType type;
  int32_t rank;
  bool optional;
};

struct Output {
  OrtElementType type;
  bool optional;
};

// One dimension of an output: ceil(argument's dimension / divisor), or a constant.
struct Dimension {
  int32_t argument;  // among the inputs the variant has; -1: `divisor` is the size
  int32_t axis;
  int64_t divisor;
};

struct OutputShape {
  int32_t rank;
  Dimension dimensions[kMaxRank];
};

struct KernelEntry {
  const char* variant;  // attribute `variant` of the nodes it serves
  TvmKernel run;
  uint32_t inputs;  // bit i: the variant has the operator's input i
  const OutputShape* outputs;  // the first ones of the operator
  size_t num_outputs;
};

struct Operator {
  const char* name;
  const Input* inputs;
  size_t num_inputs;
  const Output* outputs;
  size_t num_outputs;
  const KernelEntry* kernels;
  size_t num_kernels;
};

extern const char* const kDomain;
extern const char* const kTarget;
extern const Operator kOperators[];
extern const size_t kNumOperators;

// Null, or the first instruction set extension this processor lacks.
const char* MissingExtension();

}  // namespace subquad

#endif  // SUBQUAD_TABLE_H_
