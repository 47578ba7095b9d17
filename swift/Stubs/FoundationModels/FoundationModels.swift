// Declarations of Apple's FoundationModels of version 27, as far as this package uses it; see Stubs/CoreML/CoreML.swift.

public struct Transcript: Sendable, RandomAccessCollection {
    public enum Entry: Sendable {
        case instructions(Transcript.Instructions)
        case prompt(Transcript.Prompt)
        case response(Transcript.Response)
        case toolCalls(Transcript.ToolCalls)
        case toolOutput(Transcript.ToolOutput)
        case reasoning(Transcript.Reasoning)
    }

    public enum Segment: Sendable {
        case text(Transcript.TextSegment)
        case structure(Transcript.StructuredSegment)
    }

    public struct TextSegment: Sendable {
        public var content: String { get { fatalError() } set { fatalError() } }
    }

    public struct Instructions: Sendable {
        public var segments: [Transcript.Segment] { get { fatalError() } set { fatalError() } }
    }

    public struct Prompt: Sendable {
        public var segments: [Transcript.Segment] { get { fatalError() } set { fatalError() } }
    }

    public struct Response: Sendable {
        public var segments: [Transcript.Segment] { get { fatalError() } set { fatalError() } }
    }

    public struct StructuredSegment: Sendable {}
    public struct ToolCalls: Sendable {}
    public struct ToolOutput: Sendable {}
    public struct Reasoning: Sendable {}
    public struct ToolDefinition: Sendable {}

    public var startIndex: Int { fatalError() }
    public var endIndex: Int { fatalError() }
    public subscript(index: Int) -> Transcript.Entry { fatalError() }
}

public struct GenerationSchema: Sendable {}

public protocol ConvertibleToGeneratedContent {
}

public struct GenerationOptions: Sendable {
    public struct SamplingMode: Sendable, Equatable {
        public enum Kind: Sendable, Equatable {
            case greedy
            case randomTopK(Int, seed: UInt64?)
            case randomProbabilityThreshold(Double, seed: UInt64?)
        }

        public var kind: GenerationOptions.SamplingMode.Kind { fatalError() }
    }

    public var samplingMode: GenerationOptions.SamplingMode? { get { fatalError() } set { fatalError() } }
    public var temperature: Double? { get { fatalError() } set { fatalError() } }
    public var maximumResponseTokens: Int? { get { fatalError() } set { fatalError() } }
}

public struct LanguageModelCapabilities: Sendable {
    public struct Capability: Sendable {
        public static var guidedGeneration: LanguageModelCapabilities.Capability { fatalError() }
        public static var reasoning: LanguageModelCapabilities.Capability { fatalError() }
        public static var toolCalling: LanguageModelCapabilities.Capability { fatalError() }
    }

    public init(_ capabilities: [LanguageModelCapabilities.Capability]) { fatalError() }
}

public struct LanguageModelExecutorGenerationRequest: Sendable {
    public var transcript: Transcript { get { fatalError() } set { fatalError() } }
    public var enabledToolDefinitions: [Transcript.ToolDefinition] { get { fatalError() } set { fatalError() } }
    public var schema: GenerationSchema? { get { fatalError() } set { fatalError() } }
    public var generationOptions: GenerationOptions { get { fatalError() } set { fatalError() } }
}

public struct LanguageModelExecutorGenerationChannel: Sendable {
    public struct Event: Sendable {
        public static func reasoning(entryID: String? = nil, action: LanguageModelExecutorGenerationChannel.Reasoning.Action) -> LanguageModelExecutorGenerationChannel.Event { fatalError() }
        public static func response(entryID: String? = nil, action: LanguageModelExecutorGenerationChannel.Response.Action) -> LanguageModelExecutorGenerationChannel.Event { fatalError() }
    }

    public struct Response: Sendable {
        public struct Action: Sendable {
            public static func appendText(_ text: String, segmentID: String? = nil, tokenCount: Int) -> LanguageModelExecutorGenerationChannel.Response.Action { fatalError() }
            public static func updateUsage(input: LanguageModelExecutorGenerationChannel.Usage.Input, output: LanguageModelExecutorGenerationChannel.Usage.Output, metadata: [String: any ConvertibleToGeneratedContent] = [:]) -> LanguageModelExecutorGenerationChannel.Response.Action { fatalError() }
        }
    }

    public struct Reasoning: Sendable {
        public struct Action: Sendable {
            public static func appendText(_ text: String, segmentID: String? = nil, tokenCount: Int) -> LanguageModelExecutorGenerationChannel.Reasoning.Action { fatalError() }
        }
    }

    public struct Usage: Sendable {
        public struct Input: Sendable {
            public init(totalTokenCount: Int, cachedTokenCount: Int) { fatalError() }
        }

        public struct Output: Sendable {
            public init(totalTokenCount: Int, reasoningTokenCount: Int) { fatalError() }
        }
    }

    public func send(_ event: LanguageModelExecutorGenerationChannel.Event) async { fatalError() }
}

public enum LanguageModelError: Error {
    case contextSizeExceeded(LanguageModelError.ContextSizeExceeded)
    case unsupportedCapability(LanguageModelError.UnsupportedCapability)
    case unsupportedTranscriptContent(LanguageModelError.UnsupportedTranscriptContent)

    public struct ContextSizeExceeded: Sendable {
        public init(contextSize: Int, tokenCount: Int, debugDescription: String) { fatalError() }
    }

    public struct UnsupportedCapability: Sendable {
        public init(capability: LanguageModelCapabilities.Capability, debugDescription: String) { fatalError() }
    }

    public struct UnsupportedTranscriptContent: Sendable {
        public init(unsupportedContent: [Transcript.Entry], debugDescription: String) { fatalError() }
    }
}

public protocol LanguageModel: Sendable {
    associatedtype Executor: LanguageModelExecutor where Self == Self.Executor.Model
    var capabilities: LanguageModelCapabilities { get }
    var executorConfiguration: Self.Executor.Configuration { get }
}

public protocol LanguageModelExecutor: Sendable {
    associatedtype Configuration: Hashable, Sendable
    associatedtype Model: LanguageModel
    init(configuration: Self.Configuration) throws
    func prewarm(model: Self.Model, transcript: Transcript)
    func respond(to request: LanguageModelExecutorGenerationRequest, model: Self.Model, streamingInto channel: LanguageModelExecutorGenerationChannel) async throws
}
