import Foundation
import Testing

@testable import ShardmillDecode

private struct Recorded: Decodable {
    struct Given: Decodable {
        let count, longest: Int
        let before, after: [Int]
        let reach: Int?
    }

    /// Begin, end, type, score.
    struct Found: Decodable {
        let span: Span

        init(from decoder: Decoder) throws {
            var list = try decoder.unkeyedContainer()
            let (start, end) = (try list.decode(Int.self), try list.decode(Int.self))
            span = Span(start..<end, try list.decode(String.self), score: try list.decode(Double.self))
        }
    }

    let windows: Given?
    let tokens, taken: [[Int]]?
    let exact: Bool?
    let counts: [Int]?
    let longest: Int?
    let passes: [[Int]]?
    let labels: [String]?
    let biases: [String: Double]?
    let scores: [[Double]]?
    let path, drawn, along: [Int]?
    let shares: [Double]?
    let grouped, bioes: [Found]?
}

@Test("texts are divided into windows as in Python")
func windows() throws {
    let cases = try vectors("encoders", Recorded.self).filter { $0.windows != nil }
    #expect(cases.count == 8 && Set(cases.map(\.exact)).count == 2)
    for one in cases {
        let given = try #require(one.windows)
        let found = try Windows(
            Array(100..<100 + given.count), before: given.before, after: given.after, longest: given.longest,
            reach: given.reach)
        #expect(found.tokens == one.tokens && found.isExact == one.exact)
        #expect(found.taken.map { [$0.lowerBound, $0.upperBound] } == one.taken)
    }
    #expect(throws: ShardmillError.self) { try Windows([1, 2, 3], before: [1], after: [2], longest: 2, reach: nil) }
}

@Test("texts share passes as in Python")
func passes() throws {
    for one in try vectors("encoders", Recorded.self) where one.counts != nil {
        #expect(packedTexts(try #require(one.counts), longest: try #require(one.longest)) == one.passes)
    }
}

@Test("labels become spans as in Python")
func spans() throws {
    let cases = try vectors("encoders", Recorded.self).filter { $0.labels != nil }
    #expect(cases.count == 4)
    for one in cases {
        let (labels, shares) = (try #require(one.labels), try #require(one.shares))
        func tokens(_ rows: [Int]) -> [Span] {
            rows.enumerated().map { Span(3 * $0..<3 * $0 + 2, labels[$1], score: shares[$0]) }
        }
        let transitions = Transitions(try #require(one.biases), labels: labels)
        #expect(transitions.likeliest(try #require(one.scores)) == one.path)
        #expect(groupedSpans(tokens(try #require(one.drawn))) == one.grouped?.map(\.span))
        #expect(bioesSpans(tokens(try #require(one.along))) == one.bioes?.map(\.span))
    }
}

/// model.json of an encoder that is as it should be.
private func manifest() -> [String: Any] {
    [
        "format": 2, "model": "toy", "task": "token-classification", "buckets": [8], "labels": ["O", "B-a"],
        "band": NSNull(), "reach": NSNull(), "pooling": "mean", "vocab": 32, "rope": [String: Any](),
        "embedding": ["path": "embedding.safetensors"], "tokenizer": ["path": "tokenizer.json"], "uses": [String](),
        "parts": [
            [
                "name": "encoder_8", "kind": "encoder", "start": 0, "end": 1, "states": [String: Any](),
                "output": "logits", "program": ["path": "encoder_8.mlmodelc"],
                "inputs": ["x": [1, 32, "T", 1], "attn_mask": [1, 1, "T", "T"]],
            ] as [String: Any]
        ],
    ]
}

private func read(_ manifest: [String: Any]) throws -> EncoderManifest {
    let folder = FileManager.default.temporaryDirectory.appendingPathComponent("encoder-\(UUID().uuidString)")
    try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
    defer { try? FileManager.default.removeItem(at: folder) }
    try JSONSerialization.data(withJSONObject: manifest).write(to: folder.appendingPathComponent("model.json"))
    return try EncoderManifest(folder: folder)
}

@Test("an encoder's model.json with a key missing, of another type or out of range is an error of the build")
func damaged() throws {
    #expect(try read(manifest()).longest == 8)
    let optional: Set = ["band", "reach", "uses"]
    for key in manifest().keys.sorted() {
        for value in [nil, "text", -1, [[-1]], [String: Any](), 1 << 40] as [Any?] {
            if value == nil && optional.contains(key) { continue }
            if key == "model" && value is String || key == "rope" && value is [String: Any] { continue }
            var changed = manifest()
            changed[key] = value
            #expect("\(key): \(String(describing: value))") { try read(changed) } throws: {
                ($0 as? ShardmillError)?.kind == .build
            }
        }
    }
    for (key, value) in [("kind", "layers"), ("inputs", ["x": [1, 32, 9, 1]]), ("inputs", ["y": [1]])] as [(String, Any)] {
        var changed = manifest()
        var part = try #require((changed["parts"] as? [[String: Any]])?.first)
        part[key] = value
        changed["parts"] = [part]
        #expect(throws: ShardmillError.self) { try read(changed) }
    }
}

/// model.json of an encoder whose buckets, of 8 and 4 tokens, are chains of two programs.
private func chained() throws -> [String: Any] {
    var changed = manifest()
    let part = try #require((changed["parts"] as? [[String: Any]])?.first)
    changed["buckets"] = [8, 4]
    changed["uses"] = ["encoder-chain", "per-layer"]
    changed["parts"] = [(8, 0), (8, 1), (4, 0), (4, 1)].map { bucket, start in
        let own: [String: Any] = [
            "name": "encoder_\(bucket)_0\(start)_0\(start + 1)", "start": start, "end": start + 1,
            "program": ["path": "\(bucket)_\(start).mlmodelc"], "output": start == 0 ? "hidden" : "logits",
        ]
        return part.merging(own) { $1 }
    }
    return changed
}

@Test("a pass of an encoder in parts runs the chain of the smallest bucket that takes it")
func chain() throws {
    let content = try chained()
    let build = try ToyBuild { $0 = content }
    let backend = ToyBackend()
    let manifest = try EncoderManifest(folder: build.folder)
    #expect(manifest.chain == 2 && manifest.longest == 8)
    let encoder = try Encoder(manifest, backend: backend)
    #expect(backend.functions.count == 4)
    _ = try encoder.run([[1, 2, 3]])
    #expect(backend.runs == [4, 4])
    _ = try encoder.run([[1, 2, 3, 4, 5]])
    #expect(backend.runs == [4, 4, 8, 8])
}

@Test(
    "parts of an encoder that are no chain of layers are an error of the build",
    arguments: [[0, 1, 2], [1, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 2]])
func noChain(order: [Int]) throws {
    var changed = try chained()
    let parts = try #require(changed["parts"] as? [[String: Any]])
    changed["parts"] = order.map { parts[$0] }
    #expect(throws: ShardmillError.self) { try read(changed) }
}

@Test(
    "an encoder's build that this version can't run is refused by the name of what it has",
    arguments: [
        ("task", "text-ranking"), ("task", "summarization"), ("pooling", "last"), ("uses", "causal"), ("uses", "dense"),
        ("format", "3"), ("context", "no encoder's"), ("kind", "layers"), ("input", "kv_write_mask"),
    ])
func refused(key: String, named: String) throws {
    var changed = manifest()
    var part = try #require((changed["parts"] as? [[String: Any]])?.first)
    switch key {
    case "uses": changed[key] = [named]
    case "format": changed[key] = 3
    case "context": changed = ToyBuild.manifest()  // a decoder's
    case "kind": part["kind"] = named
    case "input": part["inputs"] = ["x": [1, 32, "T", 1], named: [1, 1, "T", "T"]]
    default: changed[key] = named
    }
    if key == "kind" || key == "input" { changed["parts"] = [part] }
    #expect("\(key): \(named)") { try read(changed) } throws: {
        let error = $0 as? ShardmillError
        return error?.kind == .build
            && error?.message.contains(key == "kind" ? "not of the kind encoder" : named) == true
    }
}

@Test("an encoder is asked for what it is for, with texts that fit")
func otherTasks() throws {
    let build = try ToyBuild { $0 = manifest() }
    let reader = try Reader(Encoder(try EncoderManifest(folder: build.folder), backend: ToyBackend()))
    func refusal(_ kind: ShardmillError.Kind, _ named: String, _ ask: () throws -> Void) {
        #expect("\(named)") { try ask() } throws: {
            let error = $0 as? ShardmillError
            return error?.kind == kind && error?.message.contains(named) == true
        }
    }
    refusal(.request, "not for text-classification") { _ = try reader.classify([[1]]) }
    refusal(.request, "not for feature-extraction") { _ = try reader.embed([[1]]) }
    let text = ReadText(ids: Array(0..<9), offsets: (0..<9).map { $0..<$0 + 1 }, inside: 4..<5)
    refusal(.build, "special tokens alone fill a pass of 8 tokens") { _ = try reader.label([text]) }
    let texts = try ToyBuild { $0 = manifest().merging(["task": "text-classification"]) { $1 } }
    let classifier = try Reader(Encoder(try EncoderManifest(folder: texts.folder), backend: ToyBackend()))
    refusal(.promptTooLong, "the text has 9 tokens") { _ = try classifier.classify([Array(0..<9)]) }
}

@Test("a number that is not finite is an error of the program, and never the first label")
func notFiniteLogits() throws {
    var changed = manifest()
    var part = try #require((changed["parts"] as? [[String: Any]])?.first)
    part["output"] = "hidden"
    changed["parts"] = [part]
    let build = try ToyBuild { $0 = changed }
    let backend = ToyBackend()
    let reader = try Reader(Encoder(try EncoderManifest(folder: build.folder), backend: backend))
    let text = ReadText(ids: [1, 2, 3], offsets: (0..<3).map { $0..<$0 + 1 }, inside: 0..<3)
    #expect(try reader.label([text]).count == 1)
    for value in [Float.nan, .infinity, -.infinity] {
        backend.spoiled = value
        #expect("\(value)") { _ = try reader.label([text]) } throws: {
            let error = $0 as? ShardmillError
            return error?.kind == .program && error?.message.contains("not finite") == true
        }
    }
}
