import Foundation
import Testing

@testable import ShardmillDecode

/// A place in JSON: keys of objects and places in arrays, from the root.
private typealias Place = [String]

/// Return every place of a JSON value, except the root.
private func places(_ value: Any, _ place: Place = []) -> [Place] {
    let here = place.isEmpty ? [] : [place]
    if let object = value as? [String: Any] {
        return here + object.keys.sorted().flatMap { places(object[$0] ?? 0, place + [$0]) }
    }
    if let array = value as? [Any] {
        return here + array.enumerated().flatMap { places($0.element, place + [String($0.offset)]) }
    }
    return here
}

/// Return a JSON value with another value at a place, or with nothing there.
private func changed(_ value: Any, _ place: ArraySlice<String>, _ new: Any?) -> Any {
    guard let step = place.first else { return new ?? NSNull() }
    let last = place.count == 1
    if var object = value as? [String: Any] {
        object[step] = last ? new : changed(object[step] ?? 0, place.dropFirst(), new)
        return object
    }
    if var array = value as? [Any], let index = Int(step) {
        if last && new == nil {
            array.remove(at: index)
        } else {
            array[index] = changed(array[index], place.dropFirst(), new)
        }
        return array
    }
    return value
}

/// The toy's model.json with every key that may be there.
private func full() -> [String: Any] {
    var manifest = ToyBuild.manifest()
    manifest["margin"] = 0.1
    manifest["reshape_frequency"] = "infrequent"
    manifest["contexts"] = [Int]()
    manifest["uses"] = ["conv", "rings"]
    manifest["requires"] = ["macos": "15.0", "ios": "18.0"]
    manifest["sampling"] = ["temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1]
    manifest["packages"] = ["head_0": ["path": "packages/head_0.mlpackage"]]
    manifest["chat"] = chat(system: true, strip: true)
    return manifest
}

/// A chat format, as model.json has it.
func chat(system: Bool, strip: Bool) -> [String: Any] {
    func around(_ role: String) -> [String: Any] {
        ["before": "<\(role)>"] + (strip ? ["strip": true] : [:]) + ["after": "</\(role)>"]
    }
    return ["begin": "<s>", "user": around("user"), "assistant": around("model"), "generate": "<model>", "stop": [3]]
        + (system ? ["system": around("system"), "without_system": "<none/>"] : [:])
}

private func + (one: [String: Any], other: [String: Any]) -> [String: Any] { one.merging(other) { $1 } }

/// Read a model.json, load the toy and feed it a prompt. Return the error, which has to be typed; nil if all went well.
private func outcome(_ content: Any) throws -> ShardmillError? {
    let build = try ToyBuild()
    let data = try JSONSerialization.data(withJSONObject: content, options: .fragmentsAllowed)
    try data.write(to: build.folder.appendingPathComponent("model.json"))
    do {
        let session = try Session(try Engine(try Manifest(folder: build.folder), backend: ToyBackend()))
        _ = try session.prefill([1, 2, 3, 4, 5])
        return nil
    } catch let error as ShardmillError {
        #expect(!error.message.isEmpty && error.message.count < 600 && !error.message.contains("\n"))
        return error
    }
}

@Test("what model.json says is read")
func everyKey() throws {
    #expect(try outcome(full()) == nil)
    var content = full()
    content["embedding"] = ["path": "embedding.safetensors", "bytes": 7]
    content["tokenizer"] = ["path": "tokenizer.json", "bytes": 5]
    for place in 0...1 {
        content = changed(content, ["parts", "\(place)", "program", "bytes"], 10) as? [String: Any] ?? [:]
    }
    let build = try ToyBuild { $0 = content }
    let manifest = try Manifest(folder: build.folder)
    #expect(manifest.uses == ["conv", "rings"] && manifest.requires == ["macos": "15.0", "ios": "18.0"])
    #expect(manifest.bytes == 32 && manifest.parts.map(\.bytes) == [10, 10])
    let sampling = try #require(manifest.sampling)
    #expect([sampling.temperature, sampling.topP, sampling.minP, sampling.repetitionPenalty] == [0.7, 0.8, 0.1, 1.1])
    #expect(sampling.topK == 20 && manifest.chat?.stop == [3])
    let plain = try ToyBuild()
    let older = try Manifest(folder: plain.folder)
    #expect(
        older.uses.isEmpty && older.requires.isEmpty && older.sampling == nil && older.chat == nil && older.bytes == nil
    )
}

@Test("a program with the labels' rows of the LM head is left out of a pass")
func labels() throws {
    var content = full()
    var own = part("labels", "labels", 16, ["hidden": rows(32)])
    (own["tokens"], own["drafter"]) = ([5, 3], nil)
    content["parts"] = (content["parts"] as? [Any] ?? []) + [own]
    content["uses"] = ["conv", "rings", "labels"]
    let build = try ToyBuild { $0 = content }
    let manifest = try Manifest(folder: build.folder)
    #expect(manifest.parts.map(\.kind) == [.layers, .head] && manifest.headRows == 32)
}

@Test("a build that this version can't run is refused by the name of what it has")
func refusedByName() throws {
    let refused: [(place: [String], value: Any, named: String)] = [
        (["uses"], ["conv", "warp"], "uses 'warp'"), (["format"], 3, "format 3"),
        (["buckets"], [8], "ShardmillEncoder"),
        (["parts", "0", "kind"], "mamba", "of the kind 'mamba'"),
        (["parts", "0", "kind"], "join", "an encoder's or a drafter's"),
        (["parts", "0", "kind"], "mtp", "an encoder's or a drafter's"),
        (["parts", "0", "kind"], "encoder", "an encoder's or a drafter's"),
        (["parts", "0", "inputs", "pixels"], [1, 3, "T", 1], "'pixels' is unknown"),
        (["parts", "0", "inputs", "attn_mask_sliding"], [1, 1, "T", 64], "window is null"),
        (["parts", "0", "inputs", "conv_read_mask"], [1, 2, 32, "T"], "conv_taps is small"),
        (["parts", "0", "inputs", "recurrent_keep_mask"], [1, 1, 1, "T"], "recurrent is missing"),
        (["drafter"], ["kind": "assistant", "taps": [], "vocab": 32, "rope": [:]], "not of the kind join"),
        (["drafter"], ["kind": "mtp", "taps": [1], "vocab": 32, "rope": [:]], "not of the kind mtp"),
        (["drafter"], ["kind": "medusa", "taps": [1], "vocab": 32, "rope": [:]], "kind 'medusa'"),
        (["recurrent"], ["block": 15, "taps": 4], "recurrent does not fit"),
        (["recurrent"], ["block": 2, "taps": 4], "passes of 4 tokens are too wide"),
        (["recurrent"], ["block": 3, "taps": 4, "narrow": 4], "passes of 4 tokens are too wide"),
        (["recurrent"], ["block": 4, "taps": 4, "narrow": 9], "recurrent.narrow is 9"),
    ]
    for (place, value, named) in refused {
        let error = try outcome(changed(full(), place[...], value))
        let message = error?.message ?? "none"
        #expect(error?.kind == .build && message.contains(named), "\(named): \(message)")
    }
}

@Test("each required key that is missing is named")
func missingKeys() throws {
    let optional: Set = [
        "verify", "margin", "reshape_frequency", "contexts", "uses", "requires", "sampling", "packages", "chat",
    ]
    for key in full().keys where !optional.contains(key) {
        let error = try outcome(changed(full(), [key], nil))
        #expect(error?.kind == .build && error?.message.contains(key) == true)
    }
    for key in optional { #expect(try outcome(changed(full(), [key], nil)) == nil) }
}

@Test("a key of another type is an error that names a place")
func otherTypes() throws {
    for key in full().keys {
        for value in ["x", [["x"]], ["x": ["x"]]] as [Any] {
            let found = try outcome(changed(full(), [key], value))
            if key == "model" && value is String || key == "sampling" && value is [String: Any] { continue }
            #expect(found?.kind == .build, "\(key) = \(value)")
        }
    }
}

@Test("whatever is changed, the outcome is a typed error or a text: no crash")
func mutations() throws {
    let values: [Any?] = [
        nil, NSNull(), -1, 0, 3, 1 << 40, 1e300, -0.5, true, "", "T", "../../etc/passwd", "/etc/passwd", [Any](),
        [String: Any](), [-1, 1 << 62],
    ]
    var count = 0
    for place in places(full()) {
        for value in values {
            _ = try outcome(changed(full(), place[...], value))
            count += 1
        }
    }
    #expect(count > 1000)
}

@Test(
    "paths that lead out of the build are refused",
    arguments: ["", "/etc/passwd", "../x", "a/../../x", "a/..", "x\0y"])
func outside(path: String) throws {
    for place in [["embedding"], ["tokenizer"], ["parts", "0", "program"], ["packages", "head_0"]] {
        let error = try outcome(changed(full(), (place + ["path"])[...], path))
        #expect(error?.kind == .build && error?.message.contains("leads out of the build") == true)
    }
}

@Test("text that is no JSON, and brackets without end, are typed errors")
func noJSON() throws {
    let build = try ToyBuild()
    let file = build.folder.appendingPathComponent("model.json")
    let brackets = String(repeating: "[", count: 1_000_000)
    let objects = String(repeating: #"{"a":"#, count: 100_000)
    let cut = try JSONSerialization.data(withJSONObject: full()).dropLast(9)
    let texts =
        ["", "{", "[]", "5", "\u{FEFF}", brackets, objects].map { Data($0.utf8) } + [Data([0xFF, 0xFE, 0]), cut]
    for text in texts {
        try text.write(to: file)
        #expect(throws: ShardmillError.self) { try Manifest(folder: build.folder) }
    }
    try FileManager.default.removeItem(at: file)
    #expect(throws: ShardmillError.self) { try Manifest(folder: build.folder) }
}

@Test("a table that is truncated or whose header lies is a typed error")
func truncatedTables() throws {
    let build = try ToyBuild()
    let file = build.folder.appendingPathComponent("embedding.safetensors")
    let whole = try Data(contentsOf: file)
    func table(_ data: Data) throws -> Table {
        try data.write(to: file)
        return try Table(file)
    }
    #expect(try table(whole).rows == 32)
    for size in [0, 1, 7, 8, 9, 40, 90, whole.count / 2, whole.count - 1] {
        #expect(throws: ShardmillError.self) { try table(whole.prefix(size)) }
    }
    func header(_ text: String) -> Data {
        withUnsafeBytes(of: UInt64(text.utf8.count).littleEndian) { Data($0) } + Data(text.utf8) + Data(count: 64)
    }
    func entry(_ dtype: String, _ shape: String, _ offsets: String) -> Data {
        header(#"{"embedding":{"dtype":"\#(dtype)","shape":\#(shape),"data_offsets":\#(offsets)}}"#)
    }
    let wrong = [
        header(""), header("{}"), header("[]"), header(String(repeating: "[", count: 1_000_000)),
        header(#"{"embedding":5}"#), entry("F32", "[2,2]", "[0,16]"), entry("F16", "[2,2]", "[0,4]"),
        entry("F16", "[2,2]", "[8,0]"), entry("F16", "[2,2]", "[-8,0]"), entry("F16", "[2]", "[0,4]"),
        entry("F16", "[2,2]", "[9223372036854775800,9223372036854775807]"), entry("F16", "[2,2]", "[0]"),
        entry("F16", "[2147483648,2147483648]", "[0,8]"), entry("F16", "[0,2]", "[0,0]"), entry("I8", "[2,2]", "[0,4]"),
        entry("F16", "[2,2]", "[-9223372036854775808,9223372036854775807]"), entry("F16", "[2,2]", "[1000,1008]"),
        Data(repeating: 0xFF, count: 64),
    ]
    for data in wrong { #expect(throws: ShardmillError.self) { try table(data) } }
}

/// A safetensors file of the toy's table, and of integers 0, 1, 2, ... as rows of two for each token and 3 layers.
private func layerRows() -> Data {
    let (vocab, rows) = (ToyBuild.vocab, 3 * ToyBuild.vocab)
    let sizes = [
        ("embedding", "F16", [vocab, vocab], 2), ("per_layer", "I8", [rows, 2], 1),
        ("per_layer.scale", "F16", [rows], 2),
    ]
    var (entries, end) = ([String](), 0)
    for (name, type, shape, bytes) in sizes {
        let next = end + shape.reduce(bytes, *)
        entries.append(#""\#(name)":{"dtype":"\#(type)","shape":\#(shape),"data_offsets":[\#(end),\#(next)]}"#)
        end = next
    }
    let header = "{\(entries.joined(separator: ","))}"
    var data = withUnsafeBytes(of: UInt64(header.utf8.count).littleEndian) { Data($0) } + Data(header.utf8)
    data += Data(count: 2 * vocab * vocab) + Data((0..<2 * rows).map { UInt8($0 % 128) })
    for row in 0..<rows { withUnsafeBytes(of: Half.bits(Float(row % 4)).littleEndian) { data.append(contentsOf: $0) } }
    return data
}

@Test("inputs for each layer get the token's row, int8 times its scale, and others are refused")
func rowsForEachLayer() throws {
    func rows(_ inputs: [String: Any]) throws -> LayerRows? {
        let build = try ToyBuild { manifest in
            for (input, shape) in inputs {
                manifest = changed(manifest, ["parts", "0", "inputs", input], shape) as? [String: Any] ?? [:]
            }
            manifest["uses"] = ["per-layer"]
        }
        try layerRows().write(to: build.folder.appendingPathComponent("embedding.safetensors"))
        return try LayerRows(try Manifest(folder: build.folder), columns: ToyBuild.vocab)
    }
    func shape(_ channels: Any) -> [Any] { [1, channels, "T", 1] }
    let found = try #require(try rows(["p_0": shape(2), "p_2": shape(2), "embedded": shape(32)])).arrays([5, 30])
    #expect(found.keys.sorted() == ["p_0", "p_2"])
    // Row 3 * token + layer has the integers 2 * row and 2 * row + 1, and the scale row mod 4.
    #expect(found["p_0"] == HostArray(shape: [1, 2, 2, 1], values: [90, 104, 93, 106]))
    #expect(found["p_2"] == HostArray(shape: [1, 2, 2, 1], values: [34, 0, 35, 0]))
    #expect(try rows([:]) == nil)
    for (input, channels) in [("p_3", 2), ("p_0", 3), ("p_-1", 2), ("p_x", 2), ("embedded", 31)] {
        #expect(throws: ShardmillError.self) { try rows([input: shape(channels)]) }
    }
    #expect(throws: ShardmillError.self) { try rows(["p_0": shape("T")]) }
}

/// A part of a drafter.
private func part(_ name: String, _ kind: String, _ rows: Int, _ inputs: [String: Any]) -> [String: Any] {
    [
        "name": name, "kind": kind, "start": 0, "end": rows, "states": [String: Any](), "output": "hidden",
        "inputs": inputs, "program": ["path": "\(name).mlmodelc"], "drafter": true,
    ]
}

/// The shape of an input that is a column for each token.
private func rows(_ channels: Int) -> [Any] { [1, channels, "T", 1] }

/// The toy with a head that drafts 3 of its tokens.
func withHead() -> [String: Any] {
    var manifest = full()
    manifest["parts"] =
        (manifest["parts"] as? [Any] ?? []) + [
            part("draft_fuse", "fuse", 1, ["x": rows(64)]),
            part("draft_layers", "layers", 1, ["x": rows(64), "attn_mask": [1, 1, "T", 64], "rope_cos": ["T", 1]]),
            part("draft_head", "head", 3, ["hidden": rows(32)]),
        ]
    // The lowest bit of a byte comes first.
    let tokens = Data([0b1000_0000, 0, 0b0000_0001, 0b0001_0000]).base64EncodedString()
    manifest["drafter"] =
        ["kind": "eagle3", "taps": [0, 1], "vocab": 3, "tokens": tokens]
        + ["rope": ["rope": ["inv_freq": [0.5], "scale": 1.0]]]
    manifest["uses"] = ["drafter"]
    return manifest
}

/// The toy with an MTP layer, which drafts all of its tokens.
private func withMTP() -> [String: Any] {
    var manifest = withHead()
    manifest["parts"] =
        (full()["parts"] as? [Any] ?? []) + [
            part("draft_fuse", "mtp", 1, ["x": rows(96)]),
            part("draft_layers", "layers", 1, ["x": rows(32), "attn_mask": [1, 1, "T", 64], "rope_cos": ["T", 1]]),
            part("draft_head", "head", 32, ["hidden": rows(32)]),
        ]
    manifest["drafter"] = ["kind": "mtp", "taps": [1], "vocab": 32, "rope": ["rope": ["inv_freq": [0.5], "scale": 1.0]]]
    return manifest
}

/// The toy with caches that the host keeps, and an assistant that reads them.
private func withAssistant() -> [String: Any] {
    var manifest = full()
    var parts = manifest["parts"] as? [[String: Any]] ?? []
    let cache = ["k_0": [1, 1, 64, 4]]
    parts[0]["inputs"] = (parts[0]["inputs"] as? [String: Any] ?? [:]) + cache
    (parts[0]["states"], parts[0]["written"]) = ([String: Any](), ["k_0": "k_0_new"])
    manifest["parts"] =
        parts + [
            part("draft_join", "join", 1, ["x": rows(96)]),
            part("draft_layers", "layers", 1, ["x": rows(32), "attn_mask": [1, 1, "T", 64]] + cache),
            part("draft_head", "head", 32, ["hidden": rows(32)]),
        ]
    manifest["drafter"] = ["kind": "assistant", "taps": [Int](), "lent": [0], "vocab": 32, "rope": [String: Any]()]
    manifest["uses"] = ["drafter", "written"]
    return manifest
}

/// Load the drafter of a toy.
private func opened(_ content: Any) throws -> any Drafter {
    let build = try ToyBuild { $0 = content as? [String: Any] ?? [:] }
    let session = try Session(try Engine(try Manifest(folder: build.folder), backend: ToyBackend()))
    return try loadDrafter(session, backend: ToyBackend())
}

/// Change what is refused of a drafter; then everything about it, one after the other, where each time it is read, or
/// refused by a typed error.
private func spoil(_ content: [String: Any], _ refused: [(place: [String], value: Any?)]) throws {
    for (place, value) in refused {
        #expect("\(place) = \(String(describing: value))") {
            try opened(changed(content, place[...], value))
        } throws: {
            ($0 as? ShardmillError)?.kind == .build
        }
    }
    for place in places(content)
    where place[0] == "drafter" || (place[0] == "parts" && place.dropFirst().first ?? "" > "1") {
        for value in [nil, NSNull(), -1, 0, 1 << 40, 1e300, true, "", "T", [Any](), [String: Any](), [-1, 1 << 62]]
            as [Any?]
        {
            do { _ = try opened(changed(content, place[...], value)) } catch is ShardmillError {}
        }
    }
}

@Test("an assistant is read, and whatever is changed in it, the outcome is a typed error or an assistant: no crash")
func assistants() throws {
    #expect(try opened(withAssistant()) is AssistantDrafter)
    let refused: [(place: [String], value: Any?)] = [
        (["parts", "2", "kind"], "fuse"), (["parts", "4", "kind"], "layers"), (["parts", "4"], nil),
        (["parts", "3", "inputs", "k_0"], [1, 1, 64, 5]), (["parts", "3", "inputs", "k_1"], [1, 1, 64, 4]),
        (["parts", "4", "end"], 31), (["drafter", "kind"], "eagle3"), (["drafter"], nil),
    ]
    try spoil(withAssistant(), refused)
}

@Test("an MTP layer is read, and whatever is changed in it, the outcome is a typed error or a layer: no crash")
func layersThatDraft() throws {
    #expect(try opened(withMTP()) is HeadDrafter)
    let refused: [(place: [String], value: Any?)] = [
        (["parts", "2", "kind"], "fuse"), (["drafter", "kind"], "eagle3"), (["drafter", "taps"], [Int]()),
        (["drafter", "taps"], [3]), (["parts", "4", "end"], 31), (["parts", "4"], nil), (["drafter"], nil),
    ]
    try spoil(withMTP(), refused)
}

@Test("a head is read, and whatever is changed in it, the outcome is a typed error or a head: no crash")
func heads() throws {
    let build = try ToyBuild { $0 = withHead() }
    let manifest = try Manifest(folder: build.folder)
    #expect(manifest.parts.count == 2 && manifest.allParts.count == 5 && manifest.withoutDrafter.drafter == nil)
    #expect(manifest.drafter?.tokens == [7, 16, 28] && manifest.drafter?.fuse.name == "draft_fuse")
    #expect(try opened(withHead()) is HeadDrafter)
    #expect(throws: ShardmillError.self) { try opened(full()) }
    let refused: [(place: [String], value: Any?)] = [
        (["drafter", "kind"], "eagle2"), (["drafter", "taps"], [Int]()), (["drafter", "taps"], [2]),
        (["drafter", "vocab"], 4), (["drafter", "tokens"], "no base64!"), (["drafter", "rope"], [String: Any]()),
        (["drafter"], nil), (["parts", "2", "kind"], "layers"), (["parts", "2", "drafter"], nil),
        (["parts", "3", "inputs", "attn_mask"], [1, 1, "T", 65]), (["parts", "4", "end"], 4), (["parts", "4"], nil),
        (["drafter", "tokens"], Data([0xFF, 0, 0, 0, 0]).base64EncodedString()),
        (["drafter", "tokens"], Data([3, 0, 0, 0, 1]).base64EncodedString()),
    ]
    try spoil(withHead(), refused)
}

@Test("no byte of model.json ends the app, and of a key that stands twice the last counts")
func brokenKeys() throws {
    let build = try ToyBuild()
    let file = build.folder.appendingPathComponent("model.json")
    let whole = [UInt8](try Data(contentsOf: file))
    func read(_ bytes: [UInt8]) throws -> Manifest? {
        try Data(bytes).write(to: file)
        do { return try Manifest(folder: build.folder) } catch {
            #expect((error as? ShardmillError)?.kind == .build, "\(error)")
            return nil
        }
    }
    for key in [[0xFF], [0x0A], Array(#"\ud800"#.utf8), Array(#"\u0000"#.utf8), Array(#"\x"#.utf8)] as [[UInt8]] {
        _ = try read(Array(#"{"k"#.utf8) + key + Array(#"": 1, "#.utf8) + whole.dropFirst())
        _ = try read(Array(#"{"k": {"a"#.utf8) + key + Array(#"": 1}, "#.utf8) + whole.dropFirst())
    }
    #expect(try read(Array(#"{"context": 32, "#.utf8) + whole.dropFirst())?.context == 64)
    var seed: UInt64 = 1
    func number(_ below: Int) -> Int {
        seed = seed &* 6_364_136_223_846_793_005 &+ 1_442_695_040_888_963_407
        return Int(seed >> 33) % below
    }
    for _ in 0..<1000 {
        var bytes = whole
        for _ in 0...number(3) { bytes[number(bytes.count)] = UInt8(number(256)) }
        _ = try read(bytes)
    }
}

@Test("a build that reads images is refused in one line that says what helps")
func imagesAreRefused() throws {
    let error = try outcome(changed(full(), ["uses"], ["images"]))
    #expect(
        error?.message
            == "model.json: the build reads images, which this package does not run: build it without `images`, or answer "
            + "with shardmill serve")
    #expect(error?.kind == .build)
    let later = try outcome(changed(full(), ["uses"], ["later"]))
    #expect(later?.message == "model.json: the build uses 'later', which this version can't run")
}
