import Foundation
import Shardmill
import ShardmillCoreML
import ShardmillDecode
import ShardmillPipe
import ShardmillText

/// One request of the file.
struct Request: Decodable {
    enum Drafting: String, Decodable { case none, ngram, suffix, head, recite }

    let prompt: [Int]?
    let text: String?
    let options: Options
    let drafter: Drafting
    let recite: [Int]
    let cancelAfter: Int?
    let adapter: String?

    private enum Keys: String, CodingKey, CaseIterable {
        case prompt, text, drafter, recite, temperature, seed, adapter
        case maxTokens = "max_tokens"
        case cancelAfter = "cancel_after"
        case topK = "top_k"
        case topP = "top_p"
        case minP = "min_p"
        case repetitionPenalty = "repetition_penalty"
        case presencePenalty = "presence_penalty"
        case frequencyPenalty = "frequency_penalty"
        case logitBias = "logit_bias"
    }

    private struct AnyKey: CodingKey {
        let stringValue: String
        let intValue: Int? = nil

        init(stringValue: String) { self.stringValue = stringValue }

        init?(intValue: Int) { nil }
    }

    init(from decoder: any Decoder) throws {
        for key in try decoder.container(keyedBy: AnyKey.self).allKeys where Keys(stringValue: key.stringValue) == nil {
            throw ShardmillError(.request, "a request has the unknown key '\(key.stringValue)'")
        }
        let keys = try decoder.container(keyedBy: Keys.self)
        prompt = try keys.decodeIfPresent([Int].self, forKey: .prompt)
        text = try keys.decodeIfPresent(String.self, forKey: .text)
        if (prompt == nil) == (text == nil) { throw ShardmillError(.request, "a request has either prompt or text") }
        var options = Options(maxTokens: try keys.decodeIfPresent(Int.self, forKey: .maxTokens) ?? 256)
        func set<Value: Decodable>(_ field: WritableKeyPath<Sampling, Value>, _ key: Keys) throws {
            if let value = try keys.decodeIfPresent(Value.self, forKey: key) {
                options.sampling[keyPath: field] = value
            }
        }
        try set(\.temperature, .temperature)
        try set(\.topK, .topK)
        try set(\.topP, .topP)
        try set(\.minP, .minP)
        try set(\.repetitionPenalty, .repetitionPenalty)
        try set(\.presencePenalty, .presencePenalty)
        try set(\.frequencyPenalty, .frequencyPenalty)
        try set(\.seed, .seed)
        for (token, bias) in try keys.decodeIfPresent([String: Double].self, forKey: .logitBias) ?? [:] {
            guard let token = Int(token) else {
                throw ShardmillError(.request, "logit_bias names the token '\(token)'")
            }
            options.sampling.logitBias[token] = bias
        }
        self.options = options
        drafter = try keys.decodeIfPresent(Drafting.self, forKey: .drafter) ?? .none
        recite = try keys.decodeIfPresent([Int].self, forKey: .recite) ?? []
        cancelAfter = try keys.decodeIfPresent(Int.self, forKey: .cancelAfter)
        adapter = try keys.decodeIfPresent(String.self, forKey: .adapter)
    }

    func makeDrafter(_ head: (any Drafter)?) -> (any Drafter)? {
        switch drafter {
        case .none: nil
        case .head: head.map(Recorder.init)
        case .ngram: NgramDrafter()
        case .suffix: SuffixDrafter()
        case .recite: Reciter(recite)
        }
    }
}

/// A drafter that keeps what another one proposes.
private final class Recorder: Drafter {
    /// What was proposed for each pass, how many of these tokens the pass had, and how many it accepted.
    private(set) var passes: [[String: Any]] = []
    private let drafter: any Drafter
    private var proposed: [Int] = []
    private var before = (drafted: 0, accepted: 0)

    init(_ drafter: any Drafter) { self.drafter = drafter }

    func reset(_ prompt: [Int]) throws { try drafter.reset(prompt) }

    func observe(_ emitted: [Int]) throws { try drafter.observe(emitted) }

    func propose(_ limit: Int) throws -> Draft {
        let draft = try drafter.propose(limit)
        proposed = draft.tokens
        return draft
    }

    /// Add a pass, if the generation has run a further one.
    func add(_ generation: Generation) {
        if generation.passes == passes.count { return }
        let (drafted, accepted) = (generation.drafted, generation.accepted)
        passes.append([
            "proposed": proposed, "drafted": drafted - before.drafted, "accepted": accepted - before.accepted,
        ])
        (proposed, before) = ([], (drafted, accepted))
    }
}

/// A drafter that knows the text, so that every pass is full.
private final class Reciter: Drafter {
    private let text: [Int]
    private var place = 0

    init(_ text: [Int]) { self.text = text }

    func reset(_ prompt: [Int]) { place = 0 }

    func observe(_ emitted: [Int]) { place += emitted.count }

    func propose(_ limit: Int) -> Draft {
        let tokens = Array(text.dropFirst(place).prefix(limit))
        return Draft(tokens: tokens, confidence: tokens.map { _ in 0.99 })
    }
}

/// Answer a file's requests in one session, in order, and report what came out.
func answer(_ command: Command) async throws {
    let requests: [Request]
    do {
        requests = try JSONDecoder().decode([Request].self, from: read(command.requests))
    } catch let error as DecodingError {
        throw ShardmillError(.request, "\(command.requests.path): \(describe(error))")
    }
    let manifest = try Manifest(folder: command.build)
    let needsText = requests.contains { $0.text != nil }
    let tokenizer = needsText ? try Tokenizer(manifest.tokenizer) : nil
    let pipe = command.engine == .pipe && command.idle == nil ? try openPipe() : nil
    let backend = try await backend(command, manifest, pipe)
    let programs = Stopwatch(backend)
    // Idle programs are not timed: to read the clock takes longer than they do.
    let session = try Session(Engine(manifest, backend: command.idle == nil ? programs : backend))
    let head = requests.contains { $0.drafter == .head } ? try loadDrafter(session, backend: programs) : nil
    var answers: [[String: Any]] = []
    for request in requests {
        let prompt = try request.prompt ?? tokenizer?.encode(request.text ?? "") ?? []
        answers.append(try answer(request, prompt, session, head, programs, tokenizer))
    }
    let report: [String: Any] = ["model": manifest.model, "requests": answers]
    if let result = command.result {
        try write(report, to: result)
    } else if let pipe {
        try pipe.ask(["op": "report", "report": report])
    } else {
        let text = try JSONSerialization.data(withJSONObject: report, options: .sortedKeys)
        FileHandle.standardOutput.write(text + Data("\n".utf8))
    }
}

private func answer(
    _ request: Request, _ prompt: [Int], _ session: Session, _ head: (any Drafter)?, _ programs: Stopwatch,
    _ tokenizer: Tokenizer?
) throws -> [String: Any] {
    var options = request.options
    options.guardMargin = session.engine.manifest.margin
    let clock = ContinuousClock()
    let start = clock.now
    let drafter = request.makeDrafter(head)
    try session.useAdapter(request.adapter)
    let generation = try Generation(session, prompt: prompt, options: options, drafter: drafter)
    let prefilled = clock.now
    let (inPrograms, before) = (programs.seconds, cpuSeconds())
    var tokens: [Int] = []
    while request.cancelAfter.map({ tokens.count < $0 }) ?? true, let token = try generation.next() {
        tokens.append(token.id)
        (drafter as? Recorder)?.add(generation)
    }
    let decoded = seconds(clock.now - prefilled)
    let host = cpuSeconds() - before - (programs.seconds - inPrograms)
    var found: [String: Any] = [
        "tokens": tokens, "reason": generation.reason?.rawValue ?? "cancelled",
        "prompt_tokens": generation.promptTokens,
        "reused": generation.reusedTokens, "passes": generation.passes, "drafted": generation.drafted,
        "accepted": generation.accepted, "prefill_seconds": seconds(prefilled - start), "decode_seconds": decoded,
        "host_seconds_per_pass": host / Double(max(1, generation.passes)),
    ]
    if let drafter = drafter as? Recorder { found["drafts"] = drafter.passes }
    if let tokenizer { found["text"] = tokenizer.decode(tokens) }
    return found
}

private func seconds(_ duration: Duration) -> Double {
    Double(duration.components.seconds) + Double(duration.components.attoseconds) * 1e-18
}

func openPipe() throws -> PipeBackend {
    if isatty(0) != 0 || isatty(1) != 0 {
        throw ShardmillError(.program, "there is no pipe: run this program by swift/scripts/pipe_engine.py")
    }
    return PipeBackend()
}

private func backend(_ command: Command, _ manifest: Manifest, _ pipe: PipeBackend?) async throws -> any Backend {
    if let idle = command.idle { return try IdleBackend(manifest, logits: read(idle)) }
    if let pipe { return pipe }
    return CoreMLBackend(bundles: try await Compiler().bundles(manifest) { _, _ in }, manifest: manifest)
}
