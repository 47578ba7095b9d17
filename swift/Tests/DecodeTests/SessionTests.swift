import Foundation
import Testing

@testable import ShardmillDecode

private struct Recorded: Decodable {
    struct Request: Decodable {
        let prompt: [Int]
        let fed: [[Int]]
        let calls: [Call]
    }

    /// A pass's slots and positions, what was forgotten, or a summary of a prefill.
    enum Call: Decodable {
        case pass([Int])
        case prefill([Int])
        case other

        private struct Prefill: Decodable { let prefill: [Int] }

        init(from decoder: Decoder) throws {
            if let pass = try? [[Int]](from: decoder), pass.count == 2 {
                self = .pass(pass[0])
            } else if let summary = try? Prefill(from: decoder) {
                self = .prefill(summary.prefill)
            } else {
                self = .other
            }
        }
    }

    let slots, verify: Int
    let widths: [Int]
    let policy: String
    let requests: [Request]
}

@Test("prompts are divided, reused and slid as in Python: the same slots in the same passes")
func sessions() throws {
    let cases = try vectors("sessions", Recorded.self)
    #expect(cases.count == 4)
    for one in cases {
        let build = try ToyBuild { $0 = ToyBuild.manifest(slots: one.slots, widths: one.widths, verify: one.verify) }
        let backend = ToyBackend()
        let engine = try Engine(try Manifest(folder: build.folder), backend: backend)
        let session = try Session(engine, contextPolicy: try #require(ContextPolicy(rawValue: one.policy)))
        for request in one.requests {
            let prefill = try session.prefill(request.prompt)
            for fed in request.fed {
                _ = try session.feed([Int](repeating: 5, count: fed[0]))
                session.commit(max(1, fed[0] - 1))
                #expect(session.room() == fed[1])
            }
            var slots: [[Int]] = []
            for case .pass(let pass) in request.calls { slots.append(pass) }
            #expect(backend.slots == slots)
            for case .prefill(let summary) in request.calls {
                #expect([prefill.held, prefill.reused, prefill.passes, prefill.width] == summary)
            }
            backend.slots = []
        }
    }
}

private func toy() throws -> Session {
    let build = try ToyBuild()
    return try Session(try Engine(try Manifest(folder: build.folder), backend: ToyBackend()))
}

private func text(_ session: Session, _ prompt: [Int], _ count: Int, _ drafter: (any Drafter)? = nil) throws -> [Int] {
    let generation = try Generation(session, prompt: prompt, options: Options(maxTokens: count), drafter: drafter)
    var found: [Int] = []
    while let token = try generation.next() { found.append(token.id) }
    return found
}

@Test("after a pass that failed, a text is fed again if the model has a recurrence", arguments: [true, false])
func failures(recurs: Bool) throws {
    let build = try ToyBuild { if recurs { $0["recurrent"] = ["block": 8, "taps": 2] } }
    let backend = ToyBackend()
    let session = try Session(try Engine(try Manifest(folder: build.folder), backend: backend))
    let text = Array(1...10)
    _ = try session.prefill(Array(text[..<8]))
    backend.fails = true  // in the pass that folds these tokens
    #expect(throws: ShardmillError.self) { try session.prefill(text) }
    backend.fails = false
    #expect(try session.prefill(text).reused == (recurs ? 0 : 8))
}

@Test("drafts change the number of passes, never the text")
func drafts() throws {
    let prompt = [1, 10, 9, 2, 17]
    let plain = try text(try toy(), prompt, 40)
    let drafted = try text(try toy(), prompt, 40, NgramDrafter())
    #expect(plain == drafted && plain.count == 40)
    let session = try toy()
    let generation = try Generation(session, prompt: prompt, options: Options(maxTokens: 40), drafter: SuffixDrafter())
    while try generation.next() != nil {}
    #expect(generation.accepted > 10 && generation.passes + generation.accepted == 39)
}

@Test("a generation that is stopped leaves a session that goes on exactly")
func stopped() throws {
    let session = try toy()
    let generation = try Generation(
        session, prompt: [1, 2, 3], options: Options(maxTokens: 30), drafter: SuffixDrafter())
    for _ in 0..<5 { _ = try generation.next() }
    generation.stop()
    #expect(try generation.next() == nil && generation.reason == .stop)
    #expect(try text(session, [1, 2, 3, 24], 20) == text(try toy(), [1, 2, 3, 24], 20))
}

@Test("the end of the text, the number of tokens and the context end a generation")
func reasons() throws {
    let prompt = [4]  // 4 -> 31, the end
    let ended = try Generation(try toy(), prompt: prompt, options: Options(maxTokens: 30))
    #expect(try ended.next() == Token(id: 31, fromDraft: false) && ended.reason == .eos)
    let short = try Generation(try toy(), prompt: [1], options: Options(maxTokens: 2))
    while try short.next() != nil {}
    #expect(short.reason == .length)
    let full = try Generation(try toy(), prompt: [Int](repeating: 1, count: 60), options: Options(maxTokens: 100))
    while try full.next() != nil {}
    #expect(full.reason == .context)
}

@Test("prompts that can't be fed are refused in one line")
func refusals() throws {
    let session = try toy()
    for (prompt, kind) in [
        ([], ShardmillError.Kind.request), ([99], .request), ([Int](repeating: 1, count: 65), .promptTooLong),
    ] {
        #expect { try session.check(prompt) } throws: { ($0 as? ShardmillError)?.kind == kind }
    }
    #expect(throws: ShardmillError.self) { try session.feed([1, 2, 3, 4, 5]) }
    #expect(throws: ShardmillError.self) { try Generation(session, prompt: [1], options: Options(maxTokens: 0)) }
    let small = try ToyBuild { $0 = ToyBuild.manifest(slots: 8) }
    let engine = try Engine(try Manifest(folder: small.folder), backend: ToyBackend())
    #expect("a context of 8 tokens is too small to slide") { try Session(engine, contextPolicy: .slide) } throws: {
        ($0 as? ShardmillError)?.kind == .request
    }
}

@Test("after a number that is not finite the states are made anew, and the next text is as if nothing had happened")
func notFinite() throws {
    let build = try ToyBuild()
    let backend = ToyBackend()
    let session = try Session(try Engine(try Manifest(folder: build.folder), backend: backend))
    let whole = try text(session, [1, 2, 3], 20)
    let made = backend.states
    for bad in [Float.nan, .infinity] {
        backend.spoiled = bad
        #expect("\(bad)") { try text(session, [1, 2, 3, 24], 20) } throws: { ($0 as? ShardmillError)?.kind == .program }
        backend.spoiled = nil
        #expect(session.tokens.isEmpty)
    }
    #expect(backend.states == made + 2)
    #expect(try text(session, [1, 2, 3], 20) == whole)
}

/// A toy with a part that takes adapters.
private func adaptable(_ toy: [String: Any] = ToyBuild.manifest()) throws -> ToyBuild {
    try ToyBuild { manifest in
        manifest = toy
        var parts = manifest["parts"] as! [[String: Any]]
        var inputs = parts[0]["inputs"] as! [String: Any]
        inputs["adapter_attn"] = [1, 1, 2, 3]
        (parts[0]["inputs"], parts[0]["adapters"]) = (inputs, ["adapter_attn": [0]])
        (manifest["parts"], manifest["adapters"], manifest["uses"]) = (parts, 2, ["adapters"] + (manifest["uses"] as? [String] ?? []))
    }
}

@Test("an adapter's matrices go into every pass until another one is used, and the text before is dropped")
func adapters() throws {
    let build = try adaptable()
    try build.addAdapter("one", "layers_00_01.adapter_attn", shape: [1, 1, 2, 3], [1, 2, 3, 4, 5, 6])
    try build.addAdapter("small", "layers_00_01.adapter_attn", shape: [1, 1, 1, 3], [1, 2, 3])
    try build.addAdapter("other", "layers_01_02.adapter_attn", shape: [1, 1, 2, 3], [1, 2, 3, 4, 5, 6])
    let manifest = try Manifest(folder: build.folder)
    #expect(manifest.adapterRank == 2 && manifest.adapterNames == ["one", "other", "small"])
    let backend = ToyBackend()
    let session = try Session(try Engine(manifest, backend: backend))
    let zeros = [Float](repeating: 0, count: 6)
    func fed(_ name: String?) throws -> Int {
        try session.useAdapter(name)
        let reused = try session.prefill([1, 2, 3]).reused
        #expect(backend.matrices == (name == nil ? zeros : [1, 2, 3, 4, 5, 6]))
        return reused
    }
    #expect(try [nil, "one", "one", nil, nil].map(fed) == [0, 0, 2, 0, 2])
    _ = try fed("one")
    for name in ["two", "small", "other", "../one", "", "."] {
        #expect("\(name)") { try session.useAdapter(name) } throws: {
            let error = $0 as? ShardmillError
            return ["small", "other"].contains(name)
                ? error?.kind == .build && error?.message.contains("layers_00_01.adapter_attn") == true
                : error?.kind == .request && error?.message.contains("it has one, other, small") == true
        }
    }
    #expect(try fed("one") == 2)  // the session stays as it was
    #expect(throws: ShardmillError.self) { try toy().useAdapter("one") }
}

@Test("an adapter that is replaced under its name is noticed by its receipt and by its file's date")
func replacedAdapters() throws {
    let build = try adaptable()
    let folder = build.folder.appendingPathComponent("adapters/one")
    func add(_ value: Float, receipt: String, at seconds: Double) throws {
        try build.addAdapter("one", "layers_00_01.adapter_attn", shape: [1, 1, 2, 3], [value, 2, 3, 4, 5, 6])
        try Data(receipt.utf8).write(to: folder.appendingPathComponent("adapter.json"))
        try FileManager.default.setAttributes(
            [.modificationDate: Date(timeIntervalSince1970: seconds)],
            ofItemAtPath: folder.appendingPathComponent("adapter.safetensors").path)
    }
    let backend = ToyBackend()
    let session = try Session(try Engine(try Manifest(folder: build.folder), backend: backend))
    func reused() throws -> Int {
        try session.useAdapter("one")
        return try session.prefill([1, 2, 3]).reused
    }
    for (value, receipt, seconds) in [(1, "a", 5), (7, "b", 5), (8, "b", 6)] as [(Float, String, Double)] {
        try add(value, receipt: receipt, at: seconds)
        let found = try (reused(), reused())
        #expect(found == (0, 2))
        #expect(backend.matrices.first == value)
    }
    try FileManager.default.removeItem(at: folder)
    #expect(throws: ShardmillError.self) { try session.useAdapter("one") }
}

@Test("a head is fed a text again after another adapter, as the model is")
func adaptersOfHeads() throws {
    let build = try adaptable(withHead())
    try build.addAdapter("one", "layers_00_01.adapter_attn", shape: [1, 1, 2, 3], [1, 2, 3, 4, 5, 6])
    let session = try Session(try Engine(try Manifest(folder: build.folder), backend: ToyBackend()))
    let backend = ToyBackend()
    let drafter = try HeadDrafter(session, backend: backend)
    func passes(_ name: String?) throws -> Int {
        try session.useAdapter(name)
        _ = try session.prefill([1, 2, 3, 4, 5, 6, 7])
        try drafter.reset([1, 2, 3, 4, 5, 6, 7])
        backend.runs = []
        _ = try drafter.propose(1)
        return backend.runs.count
    }
    let found = try [nil, nil, "one", "one", nil].map(passes)
    #expect(found[0] > found[1] && found == [found[0], found[1], found[0], found[1], found[0]])
}
