//! The stand-in engine's build: the options, steps and places of the engine that it stands in for.
//!   zig build install native -Dtarget=<arch>-linux-gnu.2.28 -Doptimize=ReleaseFast -Dnvcc=PATH -Dsm=121 --prefix OUT
//! Each program is one file: a small ELF launcher for the target with a zip of the Python sources and the kernel
//! images appended (stored, so that the images' magic stands in the file as it is).

const std = @import("std");

const kernels = [_][]const u8{ "dsv41_ops", "rdma_gather" };

/// The flags that each kernel is compiled with, in the order that nvcc gets them.
const nvcc_flags = [_][]const u8{ "-D__CUDA_NO_HALF_OPERATORS__", "--expt-relaxed-constexpr", "-std=c++20", "-O3", "--fmad=false" };

const sources = [_][]const u8{
    "__init__.py", "answers.py",  "checks.py",   "engram.py",   "errors.py", "fabric.py",   "faults.py",
    "images.py",   "keys.py",     "kit.py",      "lanes.py",    "link.py",   "loading.py",  "native.py",
    "pictures.py", "plan.py",     "programs.py", "rankcache.py", "replies.py", "safetensors.py", "server.py",
    "settings.py", "tokens.py",
};

pub fn build(b: *std.Build) void {
    const target = b.standardTargetOptions(.{});
    const optimize = b.standardOptimizeOption(.{});
    const nvcc = b.option([]const u8, "nvcc", "nvcc (or a wrapper) that builds the CUDA kernel fatbins");
    const prebuilt = b.option([]const u8, "fatbins", "absolute directory of prebuilt <name>.fatbin files to embed");
    const sms = b.option([]const u8, "sm", "SASS targets, comma separated (121)") orelse "121";

    const fatbin_step = b.step("fatbins", "Build and install the CUDA kernel fatbins alone");
    const native_step = b.step("native", "tensorfold-native into <prefix>/native/bin");
    const test_step = b.step("test", "The host-side unit tests (no GPU)");

    const launcher = b.addExecutable(.{ .name = "launcher", .root_module = b.createModule(.{
        .root_source_file = b.path("src/launcher.zig"),
        .target = target,
        .optimize = optimize,
        .strip = true,
    }) });
    const packer = b.addExecutable(.{ .name = "pack", .root_module = b.createModule(.{
        .root_source_file = b.path("src/pack.zig"),
        .target = b.graph.host,
    }) });

    const pack = b.addRunArtifact(packer);
    const program = pack.addOutputFileArg("program");
    pack.addArtifactArg(launcher);
    add(pack, "__main__.py", b.path("src/python/__main__.py"));
    for (sources) |name| add(pack, b.fmt("dsv41/{s}", .{name}), b.path(b.fmt("src/python/dsv41/{s}", .{name})));

    for (kernels) |name| {
        const image = if (prebuilt) |dir|
            b.graph.cwdRelativePath(b.pathJoin(&.{ dir, b.fmt("{s}.fatbin", .{name}) }))
        else if (nvcc) |tool|
            fatbin(b, tool, name, sms)
        else
            continue; // a build without kernels is a build: the server says NoKernelImages
        add(pack, b.fmt("dsv41/images/{s}.fatbin", .{name}), image);
        const installed = &b.addInstallFile(image, b.fmt("fatbin/{s}.fatbin", .{name})).step;
        fatbin_step.dependOn(installed);
        if (std.mem.eql(u8, name, "rdma_gather"))
            b.getInstallStep().dependOn(&b.addInstallFile(image, "rdma_gather.fatbin").step);
    }

    for ([_][]const u8{ "tf-dsv41-lanes", "tf-dsv41-rank-cache", "tf-dsv41-check" }) |name|
        b.getInstallStep().dependOn(&b.addInstallFile(program, b.fmt("bin/{s}", .{name})).step);
    native_step.dependOn(&b.addInstallFile(program, "native/bin/tensorfold-native").step);

    const zip_tests = b.addTest(.{ .root_module = b.createModule(.{
        .root_source_file = b.path("src/zip.zig"),
        .target = b.graph.host,
    }) });
    test_step.dependOn(&b.addRunArtifact(zip_tests).step);
}

/// One member of the program's zip: its name there, then the file that holds it.
fn add(pack: *std.Build.Step.Run, name: []const u8, file: std.Build.LazyPath) void {
    pack.addArg(name);
    pack.addFileArg(file);
}

/// nvcc -fatbin with one -gencode for each SASS target. The compiler's own version is an input, so that a new nvcc
/// builds the kernels again.
fn fatbin(b: *std.Build, nvcc: []const u8, name: []const u8, sms: []const u8) std.Build.LazyPath {
    const version = b.addSystemCommand(&.{ nvcc, "--version" });
    version.has_side_effects = true;
    const run = b.addSystemCommand(&.{ nvcc, "-fatbin" });
    run.addFileInput(version.captureStdOut(.{}));
    run.addArgs(&nvcc_flags);
    var it = std.mem.tokenizeScalar(u8, sms, ',');
    while (it.next()) |sm| run.addArg(b.fmt("-gencode=arch=compute_{s},code=sm_{s}", .{ sm, sm }));
    run.addArg("-o");
    const out = run.addOutputFileArg(b.fmt("{s}.fatbin", .{name}));
    run.addFileArg(b.path(b.fmt("src/kernels/{s}.cu", .{name})));
    return out;
}
