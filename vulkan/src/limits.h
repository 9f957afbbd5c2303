// What a device can do: probed once, and compared with what a kernel needs.
#ifndef KVQ_VULKAN_LIMITS_H_
#define KVQ_VULKAN_LIMITS_H_

#include <cstdint>
#include <string>

#include "loader.h"

namespace kvq {

struct Limits {
  std::string name;
  VkPhysicalDeviceType type = VK_PHYSICAL_DEVICE_TYPE_OTHER;
  uint32_t api_version = 0;
  uint32_t driver_version = 0;
  // Kernels: workgroups, grids, arguments.
  uint32_t threads = 0;
  uint32_t threads_axis[3] = {};
  uint32_t grid[3] = {};
  uint32_t shared_bytes = 0;
  uint32_t push_bytes = 0;
  uint32_t storage_buffers = 0;
  uint64_t buffer_bytes = 0;
  uint64_t offset_alignment = 1;
  // Lanes of a subgroup, 0 where they may vary or cannot exchange registers in compute kernels.
  uint32_t subgroup = 0;
  // Types: in arithmetic, and in storage buffers.
  bool float16 = false, int8 = false, int16 = false;
  bool storage8 = false, storage16 = false;
  // Ways of computing with floats of 16 and 32 bits.
  bool round_to_even16 = false, round_to_even32 = false;
  bool preserve_nan16 = false, preserve_nan32 = false;
  bool denormals16 = false;
  // Units that run workgroups side by side; a guess where the driver does not say.
  uint32_t compute_units = 0;
  bool memory_budget = false;
};

// Whether an extension is there.
bool HasExtension(VkPhysicalDevice device, const char* name);

// Probes a device. The environment variable KVQ_VULKAN_LIMITS takes some of it back, for tests of what
// smaller devices refuse: "float16=0,shared_bytes=16384".
Limits Probe(VkPhysicalDevice device);

}  // namespace kvq

#endif  // KVQ_VULKAN_LIMITS_H_
