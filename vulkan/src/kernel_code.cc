#include "kernel_code.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <sstream>

namespace kvq {

namespace {

constexpr uint32_t kMagic = 0x4B56514B, kVersion = 1;
constexpr size_t kSpirvHeader = 5;
constexpr uint32_t kOpExecutionMode = 16, kOpCapability = 17;
// Capabilities of SPIR-V, and execution modes that need them.
constexpr uint32_t kFloat16 = 9, kInt16 = 22, kInt8 = 39, kStorage16 = 4433, kStorage8 = 4448;
constexpr uint32_t kDenormPreserve = 4464, kPreserveNan = 4466, kRoundToEven = 4467;
constexpr uint32_t kDenormPreserveMode = 4459, kPreserveNanMode = 4461, kRoundToEvenMode = 4462;

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  uint32_t Word() {
    uint32_t word;
    std::memcpy(&word, Take(sizeof word), sizeof word);
    return word;
  }

  std::string String() {
    uint32_t length = Word();
    return std::string(Take(length), length);
  }

 private:
  const char* Take(size_t count) {
    if (bytes_.size() - at_ < count) TVM_FFI_THROW(ValueError) << "Vulkan kernels: the library is damaged";
    at_ += count;
    return bytes_.data() + at_ - count;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

// Calls visit(opcode, first word, words) for each instruction.
void ForEachInstruction(const std::vector<uint32_t>& spirv,
                        const std::function<void(uint32_t, const uint32_t*, uint32_t)>& visit) {
  for (size_t at = kSpirvHeader; at < spirv.size();) {
    uint32_t words = spirv[at] >> 16;
    if (words == 0 || at + words > spirv.size()) TVM_FFI_THROW(ValueError) << "Vulkan kernels: damaged SPIR-V";
    visit(spirv[at] & 0xFFFF, &spirv[at], words);
    at += words;
  }
}

std::set<uint32_t> Capabilities(const std::vector<uint32_t>& spirv) {
  std::set<uint32_t> found;
  ForEachInstruction(spirv, [&](uint32_t op, const uint32_t* words, uint32_t) {
    if (op == kOpCapability) found.insert(words[1]);
  });
  return found;
}

// Whether a device offers a way of computing with floats of so many bits.
bool HasFloatMode(uint32_t mode, uint32_t bits, const Limits& limits) {
  if (mode == kRoundToEvenMode) return bits == 16 ? limits.round_to_even16 : limits.round_to_even32;
  if (mode == kPreserveNanMode) return bits == 16 ? limits.preserve_nan16 : limits.preserve_nan32;
  return mode == kDenormPreserveMode && bits == 16 && limits.denormals16;
}

uint32_t CapabilityOf(uint32_t mode) {
  if (mode == kRoundToEvenMode) return kRoundToEven;
  if (mode == kPreserveNanMode) return kPreserveNan;
  return mode == kDenormPreserveMode ? kDenormPreserve : 0;
}

}  // namespace

uint32_t KernelCode::num_buffers() const {
  return std::count_if(arguments.begin(), arguments.end(), [](char c) { return c == 'r' || c == 'w'; });
}

uint32_t KernelCode::push_bytes() const { return 4 * (arguments.size() - num_buffers()); }

std::vector<KernelCode> ParseKernels(const std::string& bytes) {
  Reader reader(bytes);
  if (reader.Word() != kMagic || reader.Word() != kVersion) {
    TVM_FFI_THROW(ValueError) << "Vulkan kernels: written by another version of kvq-vulkan: compile the library again";
  }
  std::vector<KernelCode> kernels;
  for (uint32_t left = reader.Word(); left > 0; --left) {
    KernelCode code;
    code.name = reader.String();
    code.arguments = reader.String();
    code.grid = reader.String();
    for (uint32_t& extent : code.threads) extent = reader.Word();
    code.shared_bytes = reader.Word();
    code.subgroup = reader.Word();
    std::string spirv = reader.String();
    if (spirv.size() % 4 || spirv.size() < 4 * kSpirvHeader) {
      TVM_FFI_THROW(ValueError) << "Vulkan kernels: damaged SPIR-V";
    }
    code.spirv.resize(spirv.size() / 4);
    std::memcpy(code.spirv.data(), spirv.data(), spirv.size());
    kernels.push_back(std::move(code));
  }
  return kernels;
}

std::string Refusal(const KernelCode& code, const Limits& limits) {
  std::ostringstream line;
  uint32_t threads = code.threads[0] * code.threads[1] * code.threads[2];
  std::set<uint32_t> needs = Capabilities(code.spirv);
  auto lacks = [&](uint32_t capability, bool has) { return needs.count(capability) && !has; };
  line << "kernel " << code.name << " needs ";
  if (lacks(kFloat16, limits.float16)) {
    line << "fp16 arithmetic (shaderFloat16), which it has not";
  } else if (lacks(kStorage16, limits.storage16)) {
    line << "16-bit values in buffers (storageBuffer16BitAccess), which it has not";
  } else if (lacks(kStorage8, limits.storage8)) {
    line << "8-bit values in buffers (storageBuffer8BitAccess), which it has not";
  } else if (lacks(kInt16, limits.int16)) {
    line << "16-bit integers (shaderInt16), which it has not";
  } else if (lacks(kInt8, limits.int8)) {
    line << "8-bit integers (shaderInt8), which it has not";
  } else if (threads > limits.threads || code.threads[0] > limits.threads_axis[0]) {
    line << threads << " threads a workgroup (maxComputeWorkGroupInvocations), it has " << limits.threads;
  } else if (code.shared_bytes > limits.shared_bytes) {
    line << code.shared_bytes << " bytes of shared memory (maxComputeSharedMemorySize), it has "
         << limits.shared_bytes;
  } else if (code.num_buffers() > limits.storage_buffers) {
    line << code.num_buffers() << " storage buffers (maxPerStageDescriptorStorageBuffers), it has "
         << limits.storage_buffers;
  } else if (code.push_bytes() > limits.push_bytes) {
    line << code.push_bytes() << " bytes of push constants (maxPushConstantsSize), it has " << limits.push_bytes;
  } else if (code.subgroup && code.subgroup != limits.subgroup) {
    line << "subgroups of " << code.subgroup << " lanes (subgroupSize), it has " << limits.subgroup;
  } else {
    return "";
  }
  return line.str();
}

std::vector<uint32_t> FitFloatModes(const std::vector<uint32_t>& spirv, const Limits& limits) {
  std::set<uint32_t> used;
  ForEachInstruction(spirv, [&](uint32_t op, const uint32_t* words, uint32_t count) {
    if (op == kOpExecutionMode && count == 4 && HasFloatMode(words[2], words[3], limits)) {
      used.insert(CapabilityOf(words[2]));
    }
  });
  std::vector<uint32_t> fitted(spirv.begin(), spirv.begin() + kSpirvHeader);
  ForEachInstruction(spirv, [&](uint32_t op, const uint32_t* words, uint32_t count) {
    if (op == kOpExecutionMode && CapabilityOf(words[2]) && !HasFloatMode(words[2], words[3], limits)) return;
    bool float_control = op == kOpCapability && (words[1] == kDenormPreserve || words[1] == kPreserveNan ||
                                                 words[1] == kRoundToEven);
    if (float_control && !used.count(words[1])) return;
    fitted.insert(fitted.end(), words, words + count);
  });
  return fitted;
}

}  // namespace kvq
