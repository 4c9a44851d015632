//! A zip archive of stored members behind a prefix, as `python3 FILE` reads one: nothing in it depends on the clock or
//! the machine, so the same sources give the same program.
const std = @import("std");

pub const Member = struct { name: []const u8, data: []const u8 };

const dos_date: u16 = (1 << 5) | 1; // 1 January 1980, the first day a zip can name

/// Appends the members and the central directory to `out`, which holds the prefix already.
pub fn append(gpa: std.mem.Allocator, out: *std.ArrayList(u8), members: []const Member) !void {
    var central: std.ArrayList(u8) = .empty;
    defer central.deinit(gpa);
    for (members) |m| {
        const at: u32 = @intCast(out.items.len);
        const crc = std.hash.Crc32.hash(m.data);
        try word(gpa, out, u32, 0x04034b50);
        try common(gpa, out, m, crc);
        try out.appendSlice(gpa, m.name);
        try out.appendSlice(gpa, m.data);

        try word(gpa, &central, u32, 0x02014b50);
        try word(gpa, &central, u16, 20 | (3 << 8)); // made by version 2.0 on Unix
        try common(gpa, &central, m, crc);
        try word(gpa, &central, u16, 0); // comment
        try word(gpa, &central, u16, 0); // disk
        try word(gpa, &central, u16, 0); // internal attributes
        try word(gpa, &central, u32, 0o100644 << 16);
        try word(gpa, &central, u32, at);
        try central.appendSlice(gpa, m.name);
    }
    const start: u32 = @intCast(out.items.len);
    const size: u32 = @intCast(central.items.len);
    try out.appendSlice(gpa, central.items);
    try word(gpa, out, u32, 0x06054b50);
    try word(gpa, out, u32, 0); // disks
    try word(gpa, out, u16, @intCast(members.len));
    try word(gpa, out, u16, @intCast(members.len));
    try word(gpa, out, u32, size);
    try word(gpa, out, u32, start);
    try word(gpa, out, u16, 0); // comment
}

/// What the local header and the central one have alike: versions, sizes, name length.
fn common(gpa: std.mem.Allocator, out: *std.ArrayList(u8), m: Member, crc: u32) !void {
    try word(gpa, out, u16, 20);
    try word(gpa, out, u16, 0); // flags
    try word(gpa, out, u16, 0); // stored
    try word(gpa, out, u16, 0); // time
    try word(gpa, out, u16, dos_date);
    try word(gpa, out, u32, crc);
    try word(gpa, out, u32, @intCast(m.data.len));
    try word(gpa, out, u32, @intCast(m.data.len));
    try word(gpa, out, u16, @intCast(m.name.len));
    try word(gpa, out, u16, 0); // extra
}

fn word(gpa: std.mem.Allocator, out: *std.ArrayList(u8), comptime T: type, value: T) !void {
    var bytes: [@sizeOf(T)]u8 = undefined;
    std.mem.writeInt(T, &bytes, value, .little);
    try out.appendSlice(gpa, &bytes);
}

test "the directory's offsets count the prefix, and a member stands in the file as it is" {
    const gpa = std.testing.allocator;
    var out: std.ArrayList(u8) = .empty;
    defer out.deinit(gpa);
    try out.appendSlice(gpa, "prefix");
    try append(gpa, &out, &.{ .{ .name = "a", .data = "hello" }, .{ .name = "b/c", .data = "" } });
    try std.testing.expect(std.mem.indexOf(u8, out.items, "hello") != null);
    const end = out.items[out.items.len - 22 ..];
    const start = std.mem.readInt(u32, end[16..20], .little);
    try std.testing.expectEqual(@as(u32, 0x02014b50), std.mem.readInt(u32, out.items[start..][0..4], .little));
    try std.testing.expectEqual(@as(u32, 6), std.mem.readInt(u32, out.items[start + 42 ..][0..4], .little));
    try std.testing.expectEqual(@as(u16, 2), std.mem.readInt(u16, end[8..10], .little));
}
