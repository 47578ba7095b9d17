import Foundation
import ShardmillDecode

/// A back end whose programs run in the Python process at the other end of a pipe, on shardmill's portable engine: for
/// machines without Core ML.
///
/// The process is swift/scripts/pipe_engine.py, which starts this one and explains the frames.
package final class PipeBackend: Backend {
    private let answers: FileHandle
    private let requests: FileHandle

    /// Use a pair of pipes; standard input and output if left out.
    package init(reading answers: FileHandle = .standardInput, writing requests: FileHandle = .standardOutput) {
        self.answers = answers
        self.requests = requests
        signal(SIGPIPE, SIG_IGN)  // a write to a process that has ended is an error then, not the end of this one
    }

    /// Programs to load in place of a build's own, by the part's name.
    package var programs: [String: URL] = [:]

    package func load(_ part: Part, function: String) throws -> any LoadedFunction {
        let own = programs[part.name] == nil ? part.bundles[function] : nil
        let path = (programs[part.name] ?? own ?? part.program).path
        let answer = try ask(["op": "load", "path": path, "function": own == nil ? function : ""])
        return PipeFunction(self, model: try answer.number("model"))
    }

    /// What the process answered.
    package struct Answer {
        /// The frame's header.
        package let header: [String: Any]
        /// The arrays that the header lists.
        package let arrays: [String: HostArray]

        func number(_ key: String) throws -> Int {
            guard let number = header[key] as? Int else {
                throw ShardmillError(.program, "the engine's answer lacks \(key)")
            }
            return number
        }
    }

    /// Send a request and wait for its answer.
    @discardableResult
    package func ask(_ header: [String: Any], _ arrays: [(String, HostArray)] = []) throws -> Answer {
        var header = header
        header["arrays"] = arrays.map { [$0.0, $0.1.shape] as [Any] }
        let text = try JSONSerialization.data(withJSONObject: header)
        try write(withUnsafeBytes(of: UInt32(text.count).littleEndian) { Data($0) } + text)
        for (_, array) in arrays { try array.values.withUnsafeBytes { try write($0) } }
        let size = try read(4).enumerated().reduce(0) { $0 | Int($1.element) << (8 * $1.offset) }
        guard let answer = try JSONSerialization.jsonObject(with: read(size)) as? [String: Any] else {
            throw ShardmillError(.program, "the engine's answer is damaged")
        }
        if let error = answer["error"] as? String { throw ShardmillError(.program, error) }
        var found: [String: HostArray] = [:]
        for entry in answer["arrays"] as? [[Any]] ?? [] {
            guard let name = entry.first as? String, let shape = entry.last as? [Int] else { continue }
            let values = try [Float](unsafeUninitializedCapacity: shape.reduce(1, *)) { into, count in
                try read(into: UnsafeMutableRawBufferPointer(into))
                count = into.count
            }
            found[name] = HostArray(shape: shape, values: values)
        }
        return Answer(header: answer, arrays: found)
    }

    private func read(_ count: Int) throws -> Data {
        var found = Data(count: count)
        try found.withUnsafeMutableBytes { try read(into: $0) }
        return found
    }

    /// Read bytes straight into where they are wanted: a pass moves megabytes.
    private func read(into place: UnsafeMutableRawBufferPointer) throws {
        var left = place[...]
        while !left.isEmpty {
            let rest = UnsafeMutableRawBufferPointer(rebasing: left)
            let count = Foundation.read(answers.fileDescriptor, rest.baseAddress, rest.count)
            if count < 0 && errno == EINTR { continue }
            if count <= 0 { throw Self.ended }
            left = left.dropFirst(count)
        }
    }

    private func write(_ data: Data) throws { try data.withUnsafeBytes { try write($0) } }

    private func write(_ bytes: UnsafeRawBufferPointer) throws {
        var left = bytes[...]
        while !left.isEmpty {
            let rest = UnsafeRawBufferPointer(rebasing: left)
            let count = Foundation.write(requests.fileDescriptor, rest.baseAddress, rest.count)
            if count < 0 && errno == EINTR { continue }
            if count <= 0 { throw Self.ended }
            left = left.dropFirst(count)
        }
    }

    private static let ended = ShardmillError(.program, "the engine's process has ended")
}

private final class PipeFunction: LoadedFunction {
    private let backend: PipeBackend
    private let model: Int

    init(_ backend: PipeBackend, model: Int) {
        self.backend = backend
        self.model = model
    }

    func makeState() throws -> any ProgramState {
        PipeState(backend, number: try backend.ask(["op": "state", "model": model]).number("state"))
    }

    func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer { HostBuffer(HostArray(zeros: shape)) }

    func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer] {
        let arrays = try inputs.map { ($0.key, HostArray(shape: $0.value.shape, values: try $0.value.read())) }
        let number = (state as? PipeState)?.number ?? 0
        let answer = try backend.ask(["op": "run", "model": model, "state": number], arrays)
        return answer.arrays.mapValues { HostBuffer($0) }
    }
}

private final class PipeState: ProgramState {
    private let backend: PipeBackend
    let number: Int

    init(_ backend: PipeBackend, number: Int) {
        self.backend = backend
        self.number = number
    }

    deinit { _ = try? backend.ask(["op": "drop", "state": number]) }

    func read(_ name: String) throws -> HostArray {
        guard let found = try backend.ask(["op": "read", "state": number, "name": name]).arrays[name] else {
            throw ShardmillError(.program, "there is no state \(name)")
        }
        return found
    }

    func write(_ name: String, _ array: HostArray) throws {
        _ = try backend.ask(["op": "write", "state": number, "name": name], [(name, array)])
    }
}
