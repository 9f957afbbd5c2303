#include "device.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <sstream>

#include "stream.h"

namespace kvq {

namespace {

constexpr uint32_t kApiVersion = VK_API_VERSION_1_2;

int ComputeQueueFamily(VkPhysicalDevice physical) {
  uint32_t count = 0;
  vkGetPhysicalDeviceQueueFamilyProperties(physical, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  vkGetPhysicalDeviceQueueFamilyProperties(physical, &count, families.data());
  for (uint32_t i = 0; i < count; ++i) {
    if (families[i].queueFlags & VK_QUEUE_COMPUTE_BIT) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

Device::Device(int id, VkPhysicalDevice physical, Limits limits)
    : id_(id), physical_(physical), limits_(std::move(limits)), addresses_(id) {
  VkPhysicalDeviceMemoryProperties2 memory{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  vkGetPhysicalDeviceMemoryProperties2(physical, &memory);
  memory_ = memory.memoryProperties;
  queue_family_ = ComputeQueueFamily(physical);

  VkPhysicalDeviceVulkan12Features features12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  features12.shaderFloat16 = limits_.float16;
  features12.shaderInt8 = limits_.int8;
  features12.storageBuffer8BitAccess = limits_.storage8;
  VkPhysicalDeviceVulkan11Features features11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  features11.pNext = &features12;
  features11.storageBuffer16BitAccess = limits_.storage16;
  VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  features.pNext = &features11;
  features.features.shaderInt16 = limits_.int16;
  float priority = 1.0f;
  VkDeviceQueueCreateInfo queue{VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO};
  queue.queueFamilyIndex = queue_family_;
  queue.queueCount = 1;
  queue.pQueuePriorities = &priority;
  std::vector<const char*> extensions;
  if (limits_.memory_budget) extensions.push_back(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME);
  VkDeviceCreateInfo create{VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO};
  create.pNext = &features;
  create.queueCreateInfoCount = 1;
  create.pQueueCreateInfos = &queue;
  create.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  create.ppEnabledExtensionNames = extensions.data();
  Check(vkCreateDevice(physical, &create, nullptr, &device_), "vkCreateDevice");
  vkGetDeviceQueue(device_, queue_family_, 0, &queue_);
  VkPipelineCacheCreateInfo cache{VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO};
  Check(vkCreatePipelineCache(device_, &cache, nullptr, &pipeline_cache_), "vkCreatePipelineCache");
  stream_ = std::make_unique<Stream>(this);
}

Device::~Device() = default;

std::string Device::Describe() const {
  return "vulkan:" + std::to_string(id_) + " (" + limits_.name + ")";
}

void Device::Check(VkResult result, const char* call) {
  if (result == VK_SUCCESS) return;
  if (result == VK_ERROR_DEVICE_LOST) {
    MarkLost();
    CheckAlive();
  }
  TVM_FFI_THROW(RuntimeError) << Describe() << ": " << call << " failed with VkResult " << result;
}

void Device::CheckAlive() const {
  if (lost_) {
    TVM_FFI_THROW(RuntimeError) << Describe() << " was lost: its driver was reset or it is gone; "
                                << "start the process again to use it";
  }
}

void Device::CheckRuns(const KernelCode& code) const {
  std::string refusal = Refusal(code, limits_);
  if (!refusal.empty()) TVM_FFI_THROW(RuntimeError) << Describe() << " cannot run this library: " << refusal;
}

bool Device::Unified() const {
  return limits_.type == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU || limits_.type == VK_PHYSICAL_DEVICE_TYPE_CPU;
}

uint32_t Device::MemoryType(uint32_t allowed, MemoryUse use) const {
  constexpr VkMemoryPropertyFlags kDevice = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
  constexpr VkMemoryPropertyFlags kHost =
      VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  constexpr VkMemoryPropertyFlags kCached = kHost | VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
  std::vector<VkMemoryPropertyFlags> wishes;  // best first
  if (use == MemoryUse::kUpload) {
    wishes = {kHost};
  } else if (use == MemoryUse::kReadBack) {
    wishes = {kCached, kHost};
  } else if (Unified()) {
    wishes = {kDevice | kCached, kDevice | kHost, kDevice};
  } else {
    wishes = {kDevice};
  }
  for (VkMemoryPropertyFlags wish : wishes) {
    for (uint32_t i = 0; i < memory_.memoryTypeCount; ++i) {
      if ((allowed >> i & 1) && (memory_.memoryTypes[i].propertyFlags & wish) == wish) return i;
    }
  }
  TVM_FFI_THROW(RuntimeError) << Describe() << " has no memory of the kind that is needed";
}

std::unique_ptr<Buffer> Device::CreateBuffer(uint64_t bytes, MemoryUse use) {
  CheckAlive();
  auto buffer = std::make_unique<Buffer>();
  buffer->bytes = std::max<uint64_t>((bytes + 3) / 4 * 4, 4);
  if (buffer->bytes > limits_.buffer_bytes) {
    TVM_FFI_THROW(RuntimeError) << Describe() << " takes buffers of at most " << limits_.buffer_bytes
                                << " bytes (maxStorageBufferRange), not " << bytes;
  }
  VkBufferCreateInfo create{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
  create.size = buffer->bytes;
  create.usage = VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  if (use == MemoryUse::kDevice) create.usage |= VK_BUFFER_USAGE_STORAGE_BUFFER_BIT;
  Check(vkCreateBuffer(device_, &create, nullptr, &buffer->handle), "vkCreateBuffer");
  VkMemoryRequirements needs;
  vkGetBufferMemoryRequirements(device_, buffer->handle, &needs);
  VkMemoryAllocateInfo allocate{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO};
  allocate.allocationSize = needs.size;
  allocate.memoryTypeIndex = MemoryType(needs.memoryTypeBits, use);
  VkResult result = vkAllocateMemory(device_, &allocate, nullptr, &buffer->memory);
  if (result != VK_SUCCESS) {
    vkDestroyBuffer(device_, buffer->handle, nullptr);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY) {
      TVM_FFI_THROW(RuntimeError) << Describe() << " is out of memory: " << bytes << " bytes cannot be had, "
                                  << FreeMemory() << " are free";
    }
    Check(result, "vkAllocateMemory");
  }
  allocated_ += buffer->bytes;
  Check(vkBindBufferMemory(device_, buffer->handle, buffer->memory, 0), "vkBindBufferMemory");
  if (memory_.memoryTypes[allocate.memoryTypeIndex].propertyFlags & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT) {
    void* mapped = nullptr;
    Check(vkMapMemory(device_, buffer->memory, 0, VK_WHOLE_SIZE, 0, &mapped), "vkMapMemory");
    buffer->mapped = static_cast<char*>(mapped);
  }
  return buffer;
}

void Device::DestroyBuffer(const Buffer& buffer) {
  vkDestroyBuffer(device_, buffer.handle, nullptr);
  vkFreeMemory(device_, buffer.memory, nullptr);
  allocated_ -= buffer.bytes;
}

Pipeline Device::CreatePipeline(const KernelCode& code) {
  CheckAlive();
  CheckRuns(code);
  Pipeline pipeline;
  std::vector<VkDescriptorSetLayoutBinding> bindings(code.num_buffers());
  for (uint32_t i = 0; i < bindings.size(); ++i) {
    bindings[i] = {i, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr};
  }
  VkDescriptorSetLayoutCreateInfo descriptors{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO};
  descriptors.bindingCount = static_cast<uint32_t>(bindings.size());
  descriptors.pBindings = bindings.data();
  Check(vkCreateDescriptorSetLayout(device_, &descriptors, nullptr, &pipeline.descriptors),
        "vkCreateDescriptorSetLayout");
  VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, code.push_bytes()};
  VkPipelineLayoutCreateInfo layout{VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO};
  layout.setLayoutCount = 1;
  layout.pSetLayouts = &pipeline.descriptors;
  layout.pushConstantRangeCount = range.size ? 1 : 0;
  layout.pPushConstantRanges = &range;
  Check(vkCreatePipelineLayout(device_, &layout, nullptr, &pipeline.layout), "vkCreatePipelineLayout");

  std::vector<uint32_t> spirv = FitFloatModes(code.spirv, limits_);
  VkShaderModuleCreateInfo shader{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO};
  shader.codeSize = spirv.size() * sizeof(uint32_t);
  shader.pCode = spirv.data();
  VkShaderModule module;
  Check(vkCreateShaderModule(device_, &shader, nullptr, &module), "vkCreateShaderModule");
  VkComputePipelineCreateInfo create{VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO};
  create.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  create.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  create.stage.module = module;
  create.stage.pName = code.name.c_str();
  create.layout = pipeline.layout;
  VkResult result =
      vkCreateComputePipelines(device_, pipeline_cache_, 1, &create, nullptr, &pipeline.handle);
  vkDestroyShaderModule(device_, module, nullptr);
  Check(result, "vkCreateComputePipelines");
  return pipeline;
}

uint64_t Device::TotalMemory() const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < memory_.memoryHeapCount; ++i) {
    if (memory_.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) {
      bytes = std::max<uint64_t>(bytes, memory_.memoryHeaps[i].size);
    }
  }
  return bytes;
}

uint64_t Device::FreeMemory() const {
  if (!limits_.memory_budget) return TotalMemory() - std::min(TotalMemory(), allocated_);
  VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
  VkPhysicalDeviceMemoryProperties2 memory{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  memory.pNext = &budget;
  vkGetPhysicalDeviceMemoryProperties2(physical_, &memory);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < memory_.memoryHeapCount; ++i) {
    if (memory_.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) {
      uint64_t used = std::min(budget.heapUsage[i], budget.heapBudget[i]);
      bytes = std::max<uint64_t>(bytes, budget.heapBudget[i] - used);
    }
  }
  return bytes;
}

Devices& Devices::Get() {
  // Never destroyed: modules and tensors may outlive any order of the process's end.
  static Devices* devices = new Devices();
  return *devices;
}

Devices::Devices() {
  problem_ = LoadVulkan();
  if (!problem_.empty()) return;
  VkApplicationInfo application{VK_STRUCTURE_TYPE_APPLICATION_INFO};
  application.pApplicationName = "kvq";
  application.apiVersion = kApiVersion;
  VkInstanceCreateInfo create{VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO};
  create.pApplicationInfo = &application;
  VkInstance instance;
  VkResult result = vkCreateInstance(&create, nullptr, &instance);
  if (result != VK_SUCCESS) {
    problem_ = "no Vulkan driver is installed (vkCreateInstance: VkResult " + std::to_string(result) +
               "; Debian: mesa-vulkan-drivers)";
    return;
  }
  LoadInstanceFunctions(instance);
  uint32_t count = 0;
  vkEnumeratePhysicalDevices(instance, &count, nullptr);
  std::vector<VkPhysicalDevice> found(count);
  vkEnumeratePhysicalDevices(instance, &count, found.data());
  for (VkPhysicalDevice device : found) {
    VkPhysicalDeviceProperties properties;
    vkGetPhysicalDeviceProperties(device, &properties);
    if (properties.apiVersion < kApiVersion || ComputeQueueFamily(device) < 0) continue;
    physical_.push_back(device);
    limits_.push_back(Probe(device));
  }
  opened_.resize(physical_.size());
  if (physical_.empty()) problem_ = "the Vulkan drivers find no device of Vulkan 1.2 with a compute queue";
}

Device& Devices::Open(int id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (id < 0 || id >= count()) {
    std::ostringstream line;
    line << "there is no device vulkan:" << id << ": ";
    if (count() == 0) {
      line << problem_;
    } else {
      line << "this machine has " << count() << ", counted from 0";
    }
    TVM_FFI_THROW(RuntimeError) << line.str();
  }
  if (!opened_[id]) opened_[id] = std::make_unique<Device>(id, physical_[id], limits_[id]);
  return *opened_[id];
}

}  // namespace kvq
