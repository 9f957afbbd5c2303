"""Portable GPU kernels: Metal, Vulkan, OpenCL, WebGPU."""
