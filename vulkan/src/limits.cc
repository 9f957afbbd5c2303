#include "limits.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <thread>
#include <vector>

namespace kvq {

namespace {

// What most GPUs keep busy with, where the driver does not count its units.
constexpr uint32_t kGuessedUnits = 32;

uint32_t ComputeUnits(VkPhysicalDevice device, VkPhysicalDeviceType type) {
  if (type == VK_PHYSICAL_DEVICE_TYPE_CPU) return std::max(1u, std::thread::hardware_concurrency());
  VkPhysicalDeviceProperties2 properties{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
  if (HasExtension(device, VK_NV_SHADER_SM_BUILTINS_EXTENSION_NAME)) {
    VkPhysicalDeviceShaderSMBuiltinsPropertiesNV units{
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV};
    properties.pNext = &units;
    vkGetPhysicalDeviceProperties2(device, &properties);
    return units.shaderSMCount;
  }
  if (HasExtension(device, VK_AMD_SHADER_CORE_PROPERTIES_EXTENSION_NAME)) {
    VkPhysicalDeviceShaderCorePropertiesAMD units{
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_CORE_PROPERTIES_AMD};
    properties.pNext = &units;
    vkGetPhysicalDeviceProperties2(device, &properties);
    return units.shaderEngineCount * units.shaderArraysPerEngineCount * units.computeUnitsPerShaderArray;
  }
  return kGuessedUnits;
}

void Override(Limits* limits, const std::string& text) {
  const std::map<std::string, std::function<void(uint64_t)>> known = {
      {"float16", [&](uint64_t v) { limits->float16 = limits->float16 && v; }},
      {"storage16", [&](uint64_t v) { limits->storage16 = limits->storage16 && v; }},
      {"storage8", [&](uint64_t v) { limits->storage8 = limits->storage8 && v; }},
      {"threads", [&](uint64_t v) { limits->threads = std::min<uint64_t>(limits->threads, v); }},
      {"shared_bytes", [&](uint64_t v) { limits->shared_bytes = std::min<uint64_t>(limits->shared_bytes, v); }},
      {"push_bytes", [&](uint64_t v) { limits->push_bytes = std::min<uint64_t>(limits->push_bytes, v); }},
      {"storage_buffers",
       [&](uint64_t v) { limits->storage_buffers = std::min<uint64_t>(limits->storage_buffers, v); }},
      {"buffer_bytes", [&](uint64_t v) { limits->buffer_bytes = std::min<uint64_t>(limits->buffer_bytes, v); }},
  };
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    size_t equals = item.find('=');
    auto found = known.find(item.substr(0, equals));
    if (equals == std::string::npos || found == known.end()) continue;
    found->second(std::strtoull(item.c_str() + equals + 1, nullptr, 10));
  }
}

}  // namespace

bool HasExtension(VkPhysicalDevice device, const char* name) {
  uint32_t count = 0;
  vkEnumerateDeviceExtensionProperties(device, nullptr, &count, nullptr);
  std::vector<VkExtensionProperties> extensions(count);
  vkEnumerateDeviceExtensionProperties(device, nullptr, &count, extensions.data());
  return std::any_of(extensions.begin(), extensions.end(), [&](const VkExtensionProperties& extension) {
    return std::strcmp(extension.extensionName, name) == 0;
  });
}

Limits Probe(VkPhysicalDevice device) {
  VkPhysicalDeviceVulkan12Properties properties12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES};
  VkPhysicalDeviceVulkan11Properties properties11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES};
  properties11.pNext = &properties12;
  VkPhysicalDeviceProperties2 properties{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
  properties.pNext = &properties11;
  vkGetPhysicalDeviceProperties2(device, &properties);
  VkPhysicalDeviceVulkan12Features features12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  VkPhysicalDeviceVulkan11Features features11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  features11.pNext = &features12;
  VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  features.pNext = &features11;
  vkGetPhysicalDeviceFeatures2(device, &features);

  const VkPhysicalDeviceProperties& core = properties.properties;
  Limits limits;
  limits.name = core.deviceName;
  limits.type = core.deviceType;
  limits.api_version = core.apiVersion;
  limits.driver_version = core.driverVersion;
  limits.threads = core.limits.maxComputeWorkGroupInvocations;
  std::copy_n(core.limits.maxComputeWorkGroupSize, 3, limits.threads_axis);
  std::copy_n(core.limits.maxComputeWorkGroupCount, 3, limits.grid);
  limits.shared_bytes = core.limits.maxComputeSharedMemorySize;
  limits.push_bytes = core.limits.maxPushConstantsSize;
  limits.storage_buffers = std::min(core.limits.maxPerStageDescriptorStorageBuffers,
                                    core.limits.maxDescriptorSetStorageBuffers);
  limits.buffer_bytes = std::min<uint64_t>(core.limits.maxStorageBufferRange,
                                           properties11.maxMemoryAllocationSize);
  limits.offset_alignment = core.limits.minStorageBufferOffsetAlignment;
  const VkSubgroupFeatureFlags shuffles =
      VK_SUBGROUP_FEATURE_SHUFFLE_BIT | VK_SUBGROUP_FEATURE_SHUFFLE_RELATIVE_BIT;
  if ((properties11.subgroupSupportedOperations & shuffles) == shuffles &&
      (properties11.subgroupSupportedStages & VK_SHADER_STAGE_COMPUTE_BIT)) {
    limits.subgroup = properties11.subgroupSize;
  }
  limits.float16 = features12.shaderFloat16;
  limits.int8 = features12.shaderInt8;
  limits.int16 = features.features.shaderInt16;
  limits.storage8 = features12.storageBuffer8BitAccess;
  limits.storage16 = features11.storageBuffer16BitAccess;
  limits.round_to_even16 = properties12.shaderRoundingModeRTEFloat16;
  limits.round_to_even32 = properties12.shaderRoundingModeRTEFloat32;
  limits.preserve_nan16 = properties12.shaderSignedZeroInfNanPreserveFloat16;
  limits.preserve_nan32 = properties12.shaderSignedZeroInfNanPreserveFloat32;
  limits.denormals16 = properties12.shaderDenormPreserveFloat16;
  if (properties12.roundingModeIndependence == VK_SHADER_FLOAT_CONTROLS_INDEPENDENCE_NONE) {
    // one mode for all widths, or none
    limits.round_to_even16 = limits.round_to_even32 = limits.round_to_even16 && limits.round_to_even32;
  }
  if (properties12.denormBehaviorIndependence == VK_SHADER_FLOAT_CONTROLS_INDEPENDENCE_NONE) {
    limits.denormals16 = false;
  }
  limits.compute_units = ComputeUnits(device, core.deviceType);
  limits.memory_budget = HasExtension(device, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
  if (const char* text = std::getenv("KVQ_VULKAN_LIMITS")) Override(&limits, text);
  return limits;
}

}  // namespace kvq
