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
/// It offers text; tools and guided generation are not among its capabilities, so the framework refuses them before
/// they reach it.
@available(macOS 27, iOS 27, visionOS 27, *)
public struct ShardmillLanguageModel: LanguageModel {
    /// What answers its requests.
    public typealias Executor = ShardmillExecutor

    let model: ShardmillModel

    /// Return that there are none beside text.
    public var capabilities: LanguageModelCapabilities { LanguageModelCapabilities([]) }

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

    /// Answer a request piece by piece.
    public func respond(
        to request: LanguageModelExecutorGenerationRequest, model: ShardmillLanguageModel,
        streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws {
        let options = request.generationOptions
        let own = ShardmillOptions(
            maxTokens: options.maximumResponseTokens ?? 512, temperature: options.temperature ?? 0)
        let messages = messages(request.transcript)
        let pieces = streaming { emit in try await model.model.answer(messages, own, emit: emit) }
        for try await piece in pieces {
            // With every argument written out: a defaulted one bound a symbol that a beta of version 27 lacked.
            let action = LanguageModelExecutorGenerationChannel.Response.Action.appendText(
                piece.text, segmentID: nil, tokenCount: piece.tokens)
            await channel.send(.response(entryID: nil, action: action))
        }
    }

    private func messages(_ transcript: Transcript) -> [Message] {
        transcript.compactMap { entry in
            switch entry {
            case .instructions(let entry): return Message(.system, text(entry.segments))
            case .prompt(let entry): return Message(.user, text(entry.segments))
            case .response(let entry): return Message(.assistant, text(entry.segments))
            default: return nil
            }
        }
    }

    private func text(_ segments: [Transcript.Segment]) -> String {
        segments.map { segment in
            if case .text(let text) = segment { return text.content }
            return ""
        }.joined()
    }
}
#endif
