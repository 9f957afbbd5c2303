// A library's kernels as the code generator wrote them (kvq_vulkan/codegen.py), and what each needs.
#ifndef KVQ_VULKAN_KERNEL_CODE_H_
#define KVQ_VULKAN_KERNEL_CODE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "limits.h"

namespace kvq {

struct KernelCode {
  std::string name;
  std::string arguments;  // r, w: a buffer read, written; i, f: an integer, a float
  std::string grid;       // x, y, z: an extent of the grid; -: threads
  uint32_t threads[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;
  uint32_t subgroup = 0;
  std::vector<uint32_t> spirv;

  uint32_t num_buffers() const;
  uint32_t push_bytes() const;
};

// Reads what the code generator serialized; throws where it is damaged or of another version.
std::vector<KernelCode> ParseKernels(const std::string& bytes);

// Why a device cannot run a kernel, naming the limit; nothing if it can.
std::string Refusal(const KernelCode& code, const Limits& limits);

// The kernel's SPIR-V without the ways of computing that a device does not offer.
std::vector<uint32_t> FitFloatModes(const std::vector<uint32_t>& spirv, const Limits& limits);

}  // namespace kvq

#endif  // KVQ_VULKAN_KERNEL_CODE_H_
