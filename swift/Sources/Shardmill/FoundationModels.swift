// Apple's `LanguageModelSession` takes other models from version 27 on. Older SDKs have version 1 of the module.
#if os(Linux) || canImport(FoundationModels, _version: 2)
import FoundationModels
import ShardmillDecode

@available(macOS 27, iOS 27, visionOS 27, *)
extension ShardmillModel {
    /// The model for Apple's session: `LanguageModelSession(model: model.languageModel)`.
    nonisolated public var languageModel: ShardmillLanguageModel { ShardmillLanguageModel(model: self) }
}

/// A build as a model of Apple's FoundationModels.
///
/// It offers text, and thoughts if the model has them; tools and guided generation are not among its capabilities, so
/// the framework refuses them before they reach it.
@available(macOS 27, iOS 27, visionOS 27, *)
public struct ShardmillLanguageModel: LanguageModel {
    /// What answers its requests.
    public typealias Executor = ShardmillExecutor

    let model: ShardmillModel

    /// Return whether it thinks; there is nothing else beside text.
    public var capabilities: LanguageModelCapabilities {
        let thinks = model.manifest.chat?.thoughts != nil || model.manifest.chat?.channels == true
        return LanguageModelCapabilities(thinks ? [.reasoning] : [])
    }

    /// Return what the framework makes the executor from.
    public var executorConfiguration: ShardmillExecutor.Configuration { ShardmillExecutor.Configuration(model: model) }
}

/// What Apple's session asks for answers. Every request brings the whole transcript; what the cache holds of it is
/// reused.
@available(macOS 27, iOS 27, visionOS 27, *)
public struct ShardmillExecutor: LanguageModelExecutor {
    /// The model whose requests it answers.
    public typealias Model = ShardmillLanguageModel

    /// The framework keeps one executor for each configuration, so for each model.
    public struct Configuration: Hashable, Sendable {
        let model: ShardmillModel

        /// Return whether two configurations are of one model.
        public static func == (a: Self, b: Self) -> Bool { a.model === b.model }

        /// Feed the model's identity to a hasher.
        public func hash(into hasher: inout Hasher) { hasher.combine(ObjectIdentifier(model)) }
    }

    /// Make an executor; the configuration has all that it needs, and each request brings it again.
    public init(configuration: Configuration) throws {}

    /// Load the model in a task of its own.
    public func prewarm(model: ShardmillLanguageModel, transcript: Transcript) {
        Task { for try await _ in model.model.prewarm() {} }
    }

    /// Answer a request piece by piece, and say at the end how many tokens it took.
    ///
    /// - Throws: `LanguageModelError` for what the model can't do and for a conversation that is too long, otherwise
    ///   `ShardmillError`.
    public func respond(
        to request: LanguageModelExecutorGenerationRequest, model: ShardmillLanguageModel,
        streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws {
        if request.schema != nil { throw unsupported(.guidedGeneration, "answers that follow a schema") }
        if !request.enabledToolDefinitions.isEmpty { throw unsupported(.toolCalling, "tools") }
        let messages = try messages(request.transcript)
        let options = try options(request.generationOptions, model.model.manifest.sampling)
        do {
            try await answer(messages, options, model.model, channel)
        } catch let error as ShardmillError where error.kind == .promptTooLong {
            let tokens = try? model.model.prompt(messages).tokens.count
            throw LanguageModelError.contextSizeExceeded(
                .init(
                    contextSize: model.model.manifest.context, tokenCount: tokens ?? 0, debugDescription: error.message))
        }
    }

    private func answer(
        _ messages: [Message], _ options: ShardmillOptions, _ model: ShardmillModel,
        _ channel: LanguageModelExecutorGenerationChannel
    ) async throws {
        typealias Channel = LanguageModelExecutorGenerationChannel
        let events = streaming { (emit: @escaping @Sendable (Event) -> Void) in
            let (summary, _) = try await model.answer(messages, options) { piece, tokens in
                emit(.piece(piece, tokens: tokens))
            }
            emit(.end(summary))
        }
        var thought = 0
        for try await event in events {
            // With every argument written out: a defaulted one bound a symbol that betas of version 27 lacked.
            switch event {
            case .piece(.thought(let text), let tokens):
                thought += tokens
                let action = Channel.Reasoning.Action.appendText(text, segmentID: nil, tokenCount: tokens)
                await channel.send(.reasoning(entryID: nil, action: action))
            case .piece(.text(let text), let tokens), .piece(.call(let text), let tokens):
                let action = Channel.Response.Action.appendText(text, segmentID: nil, tokenCount: tokens)
                await channel.send(.response(entryID: nil, action: action))
            case .end(let summary):
                let action = Channel.Response.Action.updateUsage(
                    input: .init(
                        totalTokenCount: summary.promptTokens, cachedTokenCount: summary.promptTokensReused),
                    output: .init(totalTokenCount: summary.tokens, reasoningTokenCount: thought), metadata: [:])
                await channel.send(.response(entryID: nil, action: action))
            }
        }
    }

    private enum Event: Sendable {
        case piece(AnswerPiece, tokens: Int)
        case end(GenerationSummary)
    }

    /// Return how a request is generated: as it says, else as the checkpoint's authors sample, else greedily.
    func options(_ asked: GenerationOptions, _ usual: Sampling?) throws -> ShardmillOptions {
        var own = ShardmillOptions(maxTokens: asked.maximumResponseTokens ?? 512)
        own.sampling = usual ?? Sampling()
        if let temperature = asked.temperature { own.sampling.temperature = temperature }
        guard let kind = asked.samplingMode?.kind else { return own }
        (own.sampling.topK, own.sampling.topP, own.sampling.minP) = (0, 1, 0)
        var seed: UInt64?
        switch kind {
        case .greedy: own.sampling.temperature = 0
        case .randomTopK(let most, let given): (own.sampling.topK, seed) = (most, given)
        case .randomProbabilityThreshold(let share, let given): (own.sampling.topP, seed) = (share, given)
        @unknown default: throw ShardmillError(.request, "the sampling mode is not known to this version")
        }
        if kind != .greedy && own.sampling.temperature == 0 { own.sampling.temperature = asked.temperature ?? 1 }
        own.sampling.seed = seed ?? UInt64.random(in: 0...UInt64.max)
        return own
    }

    private func unsupported(_ capability: LanguageModelCapabilities.Capability, _ what: String) -> LanguageModelError {
        .unsupportedCapability(
            .init(capability: capability, debugDescription: "a build of shardmill does not offer \(what)"))
    }

    /// Return a transcript's messages. Thoughts are left out, as chat formats leave them out.
    private func messages(_ transcript: Transcript) throws -> [Message] {
        try transcript.compactMap { entry in
            switch entry {
            case .instructions(let one): return Message(.system, try text(one.segments, entry))
            case .prompt(let one): return Message(.user, try text(one.segments, entry))
            case .response(let one): return Message(.assistant, try text(one.segments, entry))
            case .reasoning: return nil
            default: throw refusal(entry, "calls of tools and their results")
            }
        }
    }

    private func text(_ segments: [Transcript.Segment], _ entry: Transcript.Entry) throws -> String {
        try segments.map { segment in
            guard case .text(let text) = segment else { throw refusal(entry, "content that is no text") }
            return text.content
        }.joined()
    }

    private func refusal(_ entry: Transcript.Entry, _ what: String) -> LanguageModelError {
        .unsupportedTranscriptContent(
            .init(unsupportedContent: [entry], debugDescription: "a build of shardmill does not take \(what)"))
    }
}
#endif
