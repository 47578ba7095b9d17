import Foundation
import Shardmill
import Testing

@testable import ShardmillDecode

#if canImport(Glibc)
import Glibc
#elseif canImport(Darwin)
import Darwin
#endif

/// A folder that goes with its owner.
private final class Scratch {
    let folder = FileManager.default.temporaryDirectory.appendingPathComponent("store-\(UUID().uuidString)")

    init() throws { try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true) }

    deinit { try? FileManager.default.removeItem(at: folder) }

    func store() -> ModelStore {
        ModelStore(folder: folder.appendingPathComponent("models"), cache: folder.appendingPathComponent("cache"))
    }

    /// Every file beneath, by its path.
    func files() -> [String] {
        let all = FileManager.default.enumerator(atPath: folder.path)?.allObjects as? [String] ?? []
        return all.filter { path in
            var isFolder: ObjCBool = false
            let file = folder.appendingPathComponent(path).path
            return FileManager.default.fileExists(atPath: file, isDirectory: &isFolder) && !isFolder.boolValue
        }.sorted()
    }
}

/// Return a toy's build whose model.json names its files, with a package of some megabytes and a compiled program.
func finishedBuild(_ change: (inout [String: Any]) -> Void = { _ in }) throws -> ToyBuild {
    let build = try ToyBuild()
    func write(_ path: String, _ content: Data) throws -> String {
        let file = build.folder.appendingPathComponent(path)
        try FileManager.default.createDirectory(at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
        try content.write(to: file)
        return try #require(try sum(of: file)).sha256
    }
    let weights = Data((0..<3 << 20).map { UInt8(truncatingIfNeeded: $0 &* 31 >> 3) })
    var manifest = ToyBuild.manifest()
    let table = try Data(contentsOf: build.folder.appendingPathComponent("embedding.safetensors"))
    manifest["embedding"] = [
        "path": "embedding.safetensors", "sha256": try write("embedding.safetensors", table), "bytes": table.count,
    ]
    manifest["tokenizer"] = ["path": "source/tokenizer.json", "sha256": try write("source/tokenizer.json", Data("{}".utf8))]
    let package = try write("packages/l.mlpackage/Data/weight.bin", weights)
    manifest["packages"] = [
        "layers_00_01": [
            "path": "packages/l.mlpackage", "bytes": weights.count, "files": ["Data/weight.bin": package],
        ]
    ]
    var parts = try #require(manifest["parts"] as? [[String: Any]])
    for (place, name) in ["layers", "head"].enumerated() {
        let path = "\(name).mlmodelc"
        let sha256 = try write("\(path)/model.mil", Data(name.utf8))
        parts[place]["program"] = ["path": path, "bytes": name.utf8.count, "files": ["model.mil": sha256]]
    }
    (manifest["parts"], manifest["chat"]) = (parts, chat(system: false, strip: false))
    change(&manifest)
    let file = build.folder.appendingPathComponent("model.json")
    try JSONSerialization.data(withJSONObject: manifest).write(to: file)
    return build
}

@Test("sha256 is that of the standard")
func sums() {
    var long = SHA256()
    for _ in 0..<1000 { long.update(Data(repeating: UInt8(ascii: "a"), count: 1000)) }
    #expect(long.hexadecimal() == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0")
    for (text, sum) in [
        ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (
            "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
    ] {
        var one = SHA256()
        for byte in text.utf8 { one.update(Data([byte])) }
        #expect(one.hexadecimal() == sum)
    }
}

@Test("an import that ended in the middle is no build, and goes on where it was")
func importedBuilds() async throws {
    let (build, scratch) = (try finishedBuild(), try Scratch())
    let store = scratch.store()
    let weights = "packages/l.mlpackage/Data/weight.bin"
    let begun = scratch.folder.appendingPathComponent("models/.begun-toy/\(weights)")  // as an app leaves it that was killed
    try FileManager.default.createDirectory(at: begun.deletingLastPathComponent(), withIntermediateDirectories: true)
    let half = try Data(contentsOf: build.folder.appendingPathComponent(weights)).prefix(3 << 19)
    try half.write(to: begun)
    #expect(store.models().isEmpty && store.unfinished() == ["toy"])
    var steps: [ModelStore.Progress] = []
    for try await step in store.importBuild(at: build.folder, name: "toy") { steps.append(step) }
    #expect(steps.last?.fraction == 1 && zip(steps, steps.dropFirst()).allSatisfy { $0.bytes <= $1.bytes })
    #expect(steps.first { $0.file == weights }?.bytes ?? 0 > half.count)  // what was there is not copied again
    #expect(store.models().map(\.name) == ["toy"] && store.unfinished().isEmpty)
    let folder = try #require(store.models().first).folder
    #expect(try Manifest(folder: folder).model == "toy")
    let has = { FileManager.default.fileExists(atPath: folder.appendingPathComponent($0).path) }
    #expect(has(weights) && has("head.mlmodelc/model.mil") && !has("layers.mlmodelc"))
    for try await _ in store.importBuild(at: build.folder, name: "toy", compiled: true) {}
    #expect(has("layers.mlmodelc/model.mil") && store.models().count == 1)
    try store.delete("toy")
    #expect(store.models().isEmpty && scratch.files().isEmpty)
}

@Test("a build with another file, with none, or with a name that leads out is refused, and leaves no build")
func refusedImports() async throws {
    let scratch = try Scratch()
    let store = scratch.store()
    func refusal(_ build: ToyBuild, _ name: String = "toy") async throws -> String {
        do {
            for try await _ in store.importBuild(at: build.folder, name: name) {}
            return ""
        } catch let error as ShardmillError { return error.message }
    }
    let changed = try finishedBuild()
    try Data("x".utf8).write(to: changed.folder.appendingPathComponent("head.mlmodelc/model.mil"))
    #expect(try await refusal(changed) == "head.mlmodelc/model.mil is not the file that model.json names: get the build again")
    try FileManager.default.removeItem(at: changed.folder.appendingPathComponent("embedding.safetensors"))
    #expect(try await refusal(changed, "other").hasPrefix("embedding.safetensors is missing in "))
    let leaving = try finishedBuild { $0["tokenizer"] = ["path": "../tokenizer.json", "sha256": "0"] }
    #expect(try await refusal(leaving).contains("leads out of the build"))
    let unnamed = try finishedBuild { $0["tokenizer"] = ["path": "tokenizer.json"] }
    #expect(try await refusal(unnamed) == "model.json: tokenizer.json has no sha256")
    let vast = try finishedBuild { $0["embedding"] = ["path": "e", "sha256": "0", "bytes": 1 << 50] }
    #expect(try await refusal(vast).contains("MiB, "))
    for name in ["", "a/b", ".."] { #expect(try await refusal(finishedBuild(), name).contains("is no name for a build")) }
    #expect(store.models().isEmpty)
}

/// A web server of one folder on the device, which may end each connection after some bytes.
private final class Server: @unchecked Sendable {
    let address: URL
    private let listener: Int32
    private let folder: URL
    private let lock = NSLock()
    private var (most, knowsRanges) = (Int.max, true)
    private var asked: [String] = []

    init(_ folder: URL) throws {
        self.folder = folder
        #if canImport(Glibc)
        let listener = socket(AF_INET, Int32(SOCK_STREAM.rawValue), 0)
        #else
        let listener = socket(AF_INET, SOCK_STREAM, 0)
        #endif
        var place = sockaddr_in()
        place.sin_family = sa_family_t(AF_INET)
        place.sin_addr.s_addr = inet_addr("127.0.0.1")
        var length = socklen_t(MemoryLayout<sockaddr_in>.size)
        let port = withUnsafeMutablePointer(to: &place) { place in
            place.withMemoryRebound(to: sockaddr.self, capacity: 1) { place -> UInt16 in
                _ = bind(listener, place, length)
                _ = listen(listener, 16)
                _ = getsockname(listener, place, &length)
                return place.withMemoryRebound(to: sockaddr_in.self, capacity: 1) { UInt16(bigEndian: $0.pointee.sin_port) }
            }
        }
        self.listener = listener
        address = try #require(URL(string: "http://127.0.0.1:\(port)/build"))
        let serving = Thread { [self] in
            while true {
                let client = accept(listener, nil, nil)
                if client < 0 { return }
                answer(client)
                close(client)
            }
        }
        serving.start()
    }

    func end() { _ = shutdown(listener, Int32(SHUT_RDWR)) }

    func limit(_ bytes: Int, knowsRanges: Bool = true) {
        lock.withLock { (most, self.knowsRanges) = (bytes, knowsRanges) }
    }

    /// The requests since the last time, each with the beginning of its range.
    func requests() -> [String] {
        lock.withLock {
            defer { asked = [] }
            return asked
        }
    }

    private func answer(_ client: Int32) {
        var text = ""
        var bytes = [UInt8](repeating: 0, count: 4096)
        while !text.contains("\r\n\r\n") {
            let count = recv(client, &bytes, bytes.count, 0)
            if count <= 0 { return }
            text += String(decoding: bytes[..<count], as: UTF8.self)
        }
        let path = text.split(separator: " ")[1].dropFirst("/build/".count)
        let (most, knows) = lock.withLock { (self.most, knowsRanges) }
        let range = text.lowercased().split(separator: "\r\n").first { $0.hasPrefix("range:") }
        let start = range.flatMap { Int($0.split(separator: "=")[1].dropLast()) } ?? 0
        lock.withLock { asked.append("\(path) \(start)") }
        guard let content = try? Data(contentsOf: folder.appendingPathComponent(String(path))) else {
            return write(client, Data("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".utf8))
        }
        let first = knows ? start : 0
        if first >= content.count && first > 0 {
            return write(client, Data("HTTP/1.1 416 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".utf8))
        }
        let rest = content.dropFirst(first)
        let status = first > 0 ? "206 Partial Content" : "200 OK"
        var head = "HTTP/1.1 \(status)\r\nContent-Length: \(rest.count)\r\nConnection: close\r\n"
        if first > 0 { head += "Content-Range: bytes \(first)-\(content.count - 1)/\(content.count)\r\n" }
        write(client, Data("\(head)\r\n".utf8) + rest.prefix(most))
    }

    private func write(_ client: Int32, _ data: Data) {
        data.withUnsafeBytes { bytes in
            var sent = 0
            while sent < bytes.count {
                #if canImport(Glibc)
                let count = send(client, bytes.baseAddress! + sent, bytes.count - sent, Int32(MSG_NOSIGNAL))
                #else
                let count = send(client, bytes.baseAddress! + sent, bytes.count - sent, 0)
                #endif
                if count <= 0 { return }
                sent += count
            }
        }
    }
}

@Test("a download whose connection ends is continued by ranges, and whole files are not asked for again")
func downloads() async throws {
    let (build, scratch) = (try finishedBuild(), try Scratch())
    let (store, server) = (scratch.store(), try Server(build.folder))
    defer { server.end() }
    func download() async throws -> String {
        do {
            for try await _ in store.download(from: server.address, name: "toy") {}
            return ""
        } catch let error as ShardmillError { return error.message }
    }
    server.limit(1 << 20)
    var tries = 0
    while tries < 10, try await download() != "" { tries += 1 }
    #expect((1..<10).contains(tries) && store.models().map(\.name) == ["toy"])
    let asked = server.requests().filter { $0.contains("weight.bin") }
    #expect(Set(asked).count == asked.count && asked.count >= 3, "\(asked)")
    #expect(server.requests().isEmpty)
    let copied = scratch.folder.appendingPathComponent("models/toy/packages/l.mlpackage/Data/weight.bin")
    #expect(try sum(of: copied)?.bytes == 3 << 20)
    server.limit(.max, knowsRanges: false)
    try store.delete("toy")
    server.limit(1 << 20)
    #expect(try await download() != "")
    server.limit(.max, knowsRanges: false)
    #expect(try await download() == "")
    try FileManager.default.removeItem(at: build.folder.appendingPathComponent("head.mlmodelc"))
    try store.delete("toy")
    #expect(try await download().contains("answers 404 for head.mlmodelc/model.mil"))
    for address in ["http://example.org/build", "file:///tmp"] {
        await #expect(throws: ShardmillError.self) {
            for try await _ in store.download(from: try #require(URL(string: address))) {}
        }
    }
}

/// A back end that says whether it is still there.
private final class Held: @unchecked Sendable {
    weak var backend: ToyBackend?
}

@Test("an app's day: import, prewarm, two chats, a full context, the background, deletion; nothing is left")
func day() async throws {
    let (build, scratch, held) = (try finishedBuild(), try Scratch(), Held())
    let store = scratch.store()
    let before = scratch.files()
    // As an import leaves it if the app is killed: a file in its middle, and no model.json.
    let weights = scratch.folder.appendingPathComponent("models/.begun-toy/packages/l.mlpackage/Data/weight.bin")
    let whole = try Data(contentsOf: build.folder.appendingPathComponent("packages/l.mlpackage/Data/weight.bin"))
    try FileManager.default.createDirectory(at: weights.deletingLastPathComponent(), withIntermediateDirectories: true)
    try whole.prefix(1_234_567).write(to: weights)
    #expect(store.models().isEmpty && store.unfinished() == ["toy"])
    let stopped = Task {
        for try await _ in store.importBuild(at: build.folder) { withUnsafeCurrentTask { $0?.cancel() } }
    }
    _ = await stopped.result
    var copied: [Double] = []
    for try await step in store.importBuild(at: build.folder) { copied.append(step.fraction) }
    #expect(copied.last == 1 && copied == copied.sorted() && store.unfinished().isEmpty)
    do {
        let folder = try #require(store.models().first).folder
        let model = try ShardmillModel(at: folder, codec: Letters()) { _, _ in
            let backend = ToyBackend()
            held.backend = backend
            return backend
        }
        var fractions: [Double] = []
        for try await step in model.prewarm() { fractions.append(step.fraction) }
        #expect(fractions.last == 1 && fractions == fractions.sorted() && fractions.count >= 4)
        #expect(held.backend != nil)
        let (one, other) = (model.chat(), model.chat())
        let options = ShardmillOptions(maxTokens: 3)
        let first = try await one.respond(to: "A", options: options)
        #expect(try await other.respond(to: "A", options: options) == first)
        model.pause()
        await #expect(throws: ShardmillError.self) { try await one.respond(to: "B", options: options) }
        model.resume()
        var full: ShardmillError?
        while full == nil {
            do { _ = try await one.respond(to: "B", options: options) } catch let error as ShardmillError { full = error }
        }
        #expect(full?.kind == .promptTooLong && full?.recoverySuggestion?.isEmpty == false)
        try await one.clear()
        #expect(try await one.respond(to: "A", options: options) == first)
        await model.unload()
        #expect(held.backend == nil)
        #expect(try await other.respond(to: "B", options: options).count == 3)
        await model.unload()
        #expect(held.backend == nil)
    }
    try store.delete("toy")
    #expect(scratch.files() == before)
}
