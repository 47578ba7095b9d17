import Foundation
import ShardmillDecode

#if os(iOS) || os(visionOS)
import os
#endif

/// What a model takes, and what the system leaves.
package enum Memory {
    /// Bytes that the app may still take before the system ends it; nil where the system sets no limit, as on a Mac.
    package static var available: Int? {
        #if os(iOS) || os(visionOS)
        let left = os_proc_available_memory()
        return left > 0 ? left : nil
        #else
        return nil
        #endif
    }

    /// Return the bytes that a build's programs and states take at most, if functions of a part share its weights.
    ///
    /// The embedding table is left out: it is mapped, and the system may drop its pages.
    ///
    /// - Parameters:
    ///   - manifest: the build's model.json.
    ///   - bundles: the bundles that are loaded in place of the build's own, by the part's name.
    package static func needed(_ manifest: Manifest, bundles: [String: URL]) -> Int {
        manifest.allParts.map { bytes(bundles[$0.name] ?? $0.program) }.reduce(states(manifest), +)
    }

    /// Return the bytes of the states of one session.
    package static func states(_ manifest: Manifest) -> Int {
        manifest.allParts.map { part in
            let caches = part.written.keys.compactMap { part.inputs[$0]?.map { $0.count(tokens: 1) } }
            return 2 * (part.states.values + caches).map { $0.reduce(1, *) }.reduce(0, +)
        }.reduce(0, +)
    }

    /// Return the bytes of all files in a folder.
    package static func bytes(_ folder: URL) -> Int {
        let files = FileManager.default.enumerator(at: folder, includingPropertiesForKeys: nil)
        var total = 0
        while let file = files?.nextObject() as? URL {
            total += (try? FileManager.default.attributesOfItem(atPath: file.path)[.size] as? Int) ?? 0
        }
        return total
    }
}
