import Foundation
import ShardmillCoreML
import ShardmillDecode

/// The builds that an app keeps on a device, each in a folder of its name.
///
/// A build comes into the store whole or not at all: what is being copied or downloaded lies in a folder that no one
/// takes for a build, and every file is compared with its sha256 in model.json. An import or a download that ended early,
/// also by the end of the app, goes on where it was when it is begun again.
public struct ModelStore: Sendable {
    /// A build in the store.
    public struct Model: Identifiable, Equatable, Sendable {
        /// Its name in the store.
        public let name: String
        /// Its folder, for `ShardmillModel(at:)`.
        public let folder: URL
        public var id: String { name }
    }

    /// How far an import or a download is.
    public struct Progress: Equatable, Sendable {
        /// Bytes that are there and right.
        public let bytes: Int
        /// Bytes in all; 0 if the build does not say.
        public let total: Int
        /// The file at work.
        public let file: String

        /// The share that is done, from 0 to 1.
        public var fraction: Double { total > 0 ? min(1, Double(bytes) / Double(total)) : 0 }
    }

    /// Where the builds lie. It must be a stable path: the system keys what it makes for the Neural Engine by it.
    public let folder: URL
    private let compiler: Compiler
    /// One comes after the other, as an import that was cancelled may still be writing.
    private static let line = Line()

    /// Open a store.
    ///
    /// - Parameters:
    ///   - folder: where builds lie; Application Support if left out.
    ///   - cache: where compiled programs lie, as `ShardmillModel(at:cache:)` has it.
    public init(folder: URL? = nil, cache: URL? = nil) {
        let home = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask).first
        self.folder = folder ?? (home ?? FileManager.default.temporaryDirectory).appendingPathComponent("Shardmill/models")
        compiler = Compiler(cache: cache)
    }

    /// Return the builds that are whole, by name.
    public func models() -> [Model] {
        let names = (try? FileManager.default.contentsOfDirectory(atPath: folder.path)) ?? []
        return names.sorted().filter { !$0.hasPrefix(".") }.map { Model(name: $0, folder: place($0)) }
            .filter { FileManager.default.fileExists(atPath: $0.folder.appendingPathComponent("model.json").path) }
    }

    /// Copy a build into the store, off the caller's thread, and yield how far it is.
    ///
    /// - Parameters:
    ///   - source: the build's folder. Access to it is the caller's to begin and to end.
    ///   - name: its name in the store; the model's if left out. A build of this name is replaced at the end.
    ///   - compiled: whether to take compiled programs whose packages are there, which are of use only on the very
    ///     version of the system that compiled them.
    /// - Throws: `ShardmillError` if a file is missing or another one, or the disk is full.
    public func importBuild(at source: URL, name: String? = nil, compiled: Bool = false) -> Streamed<Progress> {
        streaming { emit in
            guard let content = try? Data(contentsOf: source.appendingPathComponent("model.json")) else {
                throw ShardmillError(.build, "\(source.path) has no model.json: choose the folder of a finished build")
            }
            try await add(content, name, compiled, emit) { file, target in
                guard let from = try? FileHandle(forReadingFrom: source.appendingPathComponent(file)) else {
                    throw ShardmillError(.build, "\(file) is missing in \(source.path): copy the build again")
                }
                defer { try? from.close() }
                try from.seek(toOffset: target.held())
                while let piece = try from.read(upToCount: 1 << 20), !piece.isEmpty {
                    try Task.checkCancellation()
                    try target.write(piece, isRest: true)
                }
            }
        }
    }

    /// Download a build from a web server, and yield how far it is.
    ///
    /// A file that was begun is continued by a request for a range. Downloads while the app does not run are the app's:
    /// a background session may put its files into a folder for `importBuild`.
    ///
    /// - Parameters:
    ///   - base: the https address of the build's folder; `model.json` is asked for beneath it, then each file. For
    ///     tests, http is taken from the device itself.
    ///   - name: its name in the store; the model's if left out. A build of this name is replaced at the end.
    ///   - compiled: see `importBuild`.
    ///   - headers: further fields of each request, such as Authorization.
    /// - Throws: `ShardmillError` if the server refuses, a file is another one than model.json says, or the disk is full.
    public func download(
        from base: URL, name: String? = nil, compiled: Bool = false, headers: [String: String] = [:]
    ) -> Streamed<Progress> {
        streaming { emit in
            let source = try Source(base, headers)
            let content = try await source.data("model.json")
            try await add(content, name, compiled, emit) { try await source.append($0, to: $1) }
        }
    }

    /// Remove a build, what of it was begun, and its compiled copies.
    ///
    /// A model that is open goes on until it is unloaded, where the system keeps open files.
    public func delete(_ name: String) throws {
        try check(name)
        let folder = place(name)
        compiler.remove(folder)
        for url in [folder, begun(name)] where FileManager.default.fileExists(atPath: url.path) {
            try FileManager.default.removeItem(at: url)
        }
    }

    /// Return the names of builds whose import or download was begun and has not ended.
    public func unfinished() -> [String] {
        let names = (try? FileManager.default.contentsOfDirectory(atPath: folder.path)) ?? []
        return names.filter { $0.hasPrefix(".begun-") }.map { String($0.dropFirst(".begun-".count)) }.sorted()
    }

    private func place(_ name: String) -> URL { folder.appendingPathComponent(name) }
    private func begun(_ name: String) -> URL { folder.appendingPathComponent(".begun-\(name)") }

    private func check(_ name: String) throws {
        if name.isEmpty || name.hasPrefix(".") || name.contains("/") {
            throw ShardmillError(.request, "'\(name.prefix(100))' is no name for a build")
        }
    }

    /// Make a build from the files that `append` gives, each to the end of a file that holds its beginning.
    private func add(
        _ content: Data, _ wanted: String?, _ compiled: Bool, _ emit: @escaping @Sendable (Progress) -> Void,
        append: (String, Target) async throws -> Void
    ) async throws {
        let turn = Self.line.join()
        defer { Self.line.leave(turn) }
        try await Self.line.turn(turn)
        let build = try BuildFiles(content, compiled: compiled)
        let name = wanted ?? build.model
        try check(name)
        let begun = begun(name)
        try FileManager.default.createDirectory(at: begun, withIntermediateDirectories: true)
        try excludeFromBackup(folder)
        try checkSpace(build, in: begun)
        var done = 0
        for file in build.files {
            try Task.checkCancellation()
            let url = begun.appendingPathComponent(file.path)
            try FileManager.default.createDirectory(
                at: url.deletingLastPathComponent(), withIntermediateDirectories: true)
            if !FileManager.default.fileExists(atPath: url.path) { try Data().write(to: url) }
            let before = done
            var found = try sum(of: url) { _ in try Task.checkCancellation() }
            for attempt in 0..<2 where found?.sha256 != file.sha256 {
                let target = try Target(url, keeps: attempt == 0) { held in
                    emit(Progress(bytes: before + held, total: build.bytes, file: file.path))
                }
                do {
                    try await append(file.path, target)
                } catch let error as CocoaError where error.code == .fileWriteOutOfSpace {
                    throw full(build, 0)
                }
                try target.close()
                found = try sum(of: url) { _ in try Task.checkCancellation() }
            }
            guard let found, found.sha256 == file.sha256 else {
                try? FileManager.default.removeItem(at: url)
                throw ShardmillError(.build, "\(file.path) is not the file that model.json names: get the build again")
            }
            done += found.bytes
            emit(Progress(bytes: done, total: build.bytes, file: file.path))
        }
        try content.write(to: begun.appendingPathComponent("model.json"))
        if FileManager.default.fileExists(atPath: place(name).path) { try removeKept(name) }
        try FileManager.default.moveItem(at: begun, to: place(name))
    }

    /// Remove a build that another one replaces.
    private func removeKept(_ name: String) throws {
        compiler.remove(place(name))
        try FileManager.default.removeItem(at: place(name))
    }

    private func checkSpace(_ build: BuildFiles, in target: URL) throws {
        let need = build.bytes - Memory.bytes(target)
        #if canImport(Darwin)
        let keys: Set<URLResourceKey> = [.volumeAvailableCapacityForImportantUsageKey]
        let free = try? target.resourceValues(forKeys: keys).volumeAvailableCapacityForImportantUsage.map(Int.init)
        #else
        let status = try? FileManager.default.attributesOfFileSystem(forPath: target.path)
        let free = (status?[.systemFreeSize] as? NSNumber)?.intValue
        #endif
        if let free, need > free { throw full(build, free) }
    }

    private func full(_ build: BuildFiles, _ free: Int) -> ShardmillError {
        ShardmillError(
            .build, "\(build.model) takes \(build.bytes >> 20) MiB, \(free >> 20) are free: free some space on the device")
    }
}

/// A file that is being written, by one thread at a time.
final class Target: @unchecked Sendable {
    private let file: FileHandle
    private let note: @Sendable (Int) -> Void
    private var bytes: Int
    private var isFirst = true

    /// Open a file.
    ///
    /// - Parameters:
    ///   - url: the file, which is there.
    ///   - keeps: whether what it holds stays; otherwise it was the beginning of something else.
    ///   - note: called with the bytes that it then holds.
    init(_ url: URL, keeps: Bool, note: @escaping @Sendable (Int) -> Void) throws {
        file = try FileHandle(forWritingTo: url)
        self.note = note
        if !keeps { try file.truncate(atOffset: 0) }
        bytes = Int(try file.seekToEnd())
    }

    /// Return the bytes that it holds.
    func held() -> UInt64 { UInt64(bytes) }

    /// Append a piece; if it does not belong to the rest, the file begins anew.
    func write(_ piece: Data, isRest: Bool) throws {
        if isFirst && !isRest {
            try file.truncate(atOffset: 0)
            bytes = 0
        }
        isFirst = false
        try file.write(contentsOf: piece)
        bytes += piece.count
        note(bytes)
    }

    func close() throws { try file.close() }

    deinit { try? file.close() }
}
