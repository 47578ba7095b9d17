import Foundation
import Shardmill

@testable import ShardmillDecode

/// A model of one layer that changes nothing and a head that does not either: the logits of a token are its row of the
/// embedding table, or the row's beginning for a draft head. What a pass would write where is in the masks, which the
/// back end records.
final class ToyBackend: Backend {
    var slots: [[Int]] = []
    var functions: [String] = []
    /// T of each run.
    var runs: [Int] = []
    /// How many states were made.
    var states = 0
    /// What the layer writes in place of its output.
    var spoiled: Float?
    /// Whether the next run fails, as when an app goes to the background.
    var fails = false
    /// What the last run found in the input adapter_attn.
    var matrices: [Float] = []

    func load(_ part: Part, function: String) throws -> any LoadedFunction {
        functions.append(function)
        return ToyFunction(self, part)
    }
}

private final class ToyFunction: LoadedFunction {
    private let backend: ToyBackend
    private let part: Part

    init(_ backend: ToyBackend, _ part: Part) {
        self.backend = backend
        self.part = part
    }

    func makeState() throws -> any ProgramState {
        backend.states += 1
        return ToyState()
    }

    func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer { HostBuffer(HostArray(zeros: shape)) }

    func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer] {
        if backend.fails { throw ShardmillError(.program, "no Neural Engine in the background") }
        backend.runs.append((inputs["x"] ?? inputs["hidden"])?.shape[2] ?? 0)
        if let mask = (inputs["kv_write_mask"] as? HostBuffer)?.array {
            let count = mask.shape[3]
            backend.slots.append(
                (0..<count).compactMap { t in (0..<mask.shape[2]).first { mask.values[$0 * count + t] == 1 } })
        }
        if let array = (inputs["adapter_attn"] as? HostBuffer)?.array { backend.matrices = array.values }
        if let spoiled = backend.spoiled, let shape = inputs["x"]?.shape {
            let values = [Float](repeating: spoiled, count: shape.reduce(1, *))
            return ["hidden": HostBuffer(HostArray(shape: shape, values: values))]
        }
        guard part.kind == .head, let hidden = inputs["hidden"] else { return ["hidden": inputs["x"]!] }
        let shape = [1, part.end - part.start, hidden.shape[2], 1]
        return ["logits": HostBuffer(HostArray(shape: shape, values: Array(try hidden.read()[..<shape.reduce(1, *)])))]
    }
}

private final class ToyState: ProgramState {
    private var arrays: [String: HostArray] = [:]

    func read(_ name: String) throws -> HostArray { arrays[name] ?? HostArray(zeros: [1, 1, 1, 1]) }
    func write(_ name: String, _ array: HostArray) throws { arrays[name] = array }
}

/// A folder with the toy's model.json and embedding table.
final class ToyBuild {
    static let vocab = 32
    let folder: URL

    init(_ change: (inout [String: Any]) -> Void = { _ in }) throws {
        folder = FileManager.default.temporaryDirectory.appendingPathComponent("toy-\(UUID().uuidString)")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        var manifest = Self.manifest()
        change(&manifest)
        try JSONSerialization.data(withJSONObject: manifest).write(to: folder.appendingPathComponent("model.json"))
        try table().write(to: folder.appendingPathComponent("embedding.safetensors"))
    }

    deinit { try? FileManager.default.removeItem(at: folder) }

    static func manifest(slots: Int = 64, widths: [Int] = [1, 4], verify: Int = 4) -> [String: Any] {
        let layers: [String: Any] = [
            "name": "layers_00_01", "kind": "layers", "start": 0, "end": 1, "states": ["k_0": [1, 1, slots, 4]],
            "output": "hidden", "program": ["path": "layers.mlmodelc", "compiler": ["name": "portable"]],
            "inputs": [
                "x": [1, vocab, "T", 1], "rope_cos": ["T", 2], "rope_sin": ["T", 2], "attn_mask": [1, 1, "T", slots],
                "kv_write_mask": [1, 1, slots, "T"],
            ] as [String: Any],
        ]
        let head: [String: Any] = [
            "name": "head_0", "kind": "head", "start": 0, "end": vocab, "states": [String: Any](), "output": "logits",
            "inputs": ["hidden": [1, vocab, "T", 1]], "program": ["path": "head.mlmodelc"],
        ]
        return [
            "format": 2, "model": "toy", "context": slots, "tokens_max": widths.max()!, "widths": widths,
            "verify": verify,
            "vocab": vocab, "eos_token_ids": [31], "rope": ["rope": ["inv_freq": [1.0, 0.1], "scale": 1.0]],
            "window": NSNull(), "window_slots": 0, "conv_taps": 0, "embedding": ["path": "embedding.safetensors"],
            "tokenizer": ["path": "tokenizer.json"], "parts": [layers, head],
        ]
    }

    /// Add an adapter with one tensor.
    func addAdapter(_ name: String, _ tensor: String, shape: [Int], _ values: [Float]) throws {
        let own = folder.appendingPathComponent("adapters/\(name)")
        try FileManager.default.createDirectory(at: own, withIntermediateDirectories: true)
        let header = #"{"\#(tensor)":{"dtype":"F16","shape":\#(shape),"data_offsets":[0,\#(2 * values.count)]}}"#
        var data = withUnsafeBytes(of: UInt64(header.utf8.count).littleEndian) { Data($0) } + Data(header.utf8)
        for value in values { withUnsafeBytes(of: Half.bits(value).littleEndian) { data.append(contentsOf: $0) } }
        try data.write(to: own.appendingPathComponent("adapter.safetensors"))
    }

    /// Row t is 1 at (7 t + 3) mod 32: a text goes on by a rule that drafters can learn.
    private func table() -> Data {
        let count = Self.vocab
        let header =
            #"{"embedding":{"dtype":"F16","shape":[\#(count),\#(count)],"data_offsets":[0,\#(2 * count * count)]}}"#
        var data = withUnsafeBytes(of: UInt64(header.utf8.count).littleEndian) { Data($0) } + Data(header.utf8)
        for row in 0..<count {
            for column in 0..<count {
                let value = Float16(column == (7 * row + 3) % count ? 1 : 0).bitPattern.littleEndian
                withUnsafeBytes(of: value) { data.append(contentsOf: $0) }
            }
        }
        return data
    }
}

/// A token for each letter.
struct Letters: TextCodec {
    func encode(_ text: String, addSpecialTokens: Bool) throws -> [Int] { text.utf8.map { Int($0) % ToyBuild.vocab } }

    func decode(_ tokens: [Int], skipSpecialTokens: Bool) -> String {
        String(decoding: tokens.map { UInt8(65 + $0) }, as: UTF8.self)
    }
}
